// Resuming a run: which of the checkpoint's options go on beside those that were typed, and whether the code of
// --format files that a checkpoint names may run. Functions that return false have written a sentence into `error`.
#pragma once
#include "checkpoint.h"
#include "loader.h"
C_LINKAGE_BEGIN

enum { RESUME_CHANGED_BYTES = 16384 };

// Options that are merged with a checkpoint's.
typedef struct {
    const OptionTable* table;
    void* fields;                        // the options
    const bool* given;                   // (table->count) which of them were typed
    char from[RUN_PATH_BYTES];           // the checkpoint that the run goes on from; "": it begins anew
    bool named_itself;                   // the user named that checkpoint, not only its run
    Json* state;                         // its state.json; NULL: none. The caller frees it
    const Json* saved;                   // "options" of state.json
    char changed[RESUME_CHANGED_BYTES];  // what is not as it was, for the banner: " --lr 0.1 (was 0.2)"
} Resume;

// True if this option was typed.
bool resume_given(const Resume* resume, const char* name);
// Chooses the checkpoint that --resume means, into `from`, and holds the run folder. One process calls it.
bool resume_find(Resume* resume, RunFolder* run, char* error);
// Opens `state` where resume_find has not, and takes the checkpoint's options. `print`: this process may print notes.
bool resume_take(Resume* resume, bool print, char* error);
// Sets where the run stands: at its beginning, or where the checkpoint was. Notes in `changed` if its data is another.
void resume_state(Resume* resume, RunFolder* run, const Dataset* train, const Dataset* val);
// Refuses options for a path or name that were typed empty, as by a shell's variable that is not set.
bool resume_words(const Resume* resume, char* error);
// Takes options that were not typed from the checkpoint, but for --override, which is the optimizer's, and lists typed
// ones that differ. Those on which the model's shape depends must be the same.
bool resume_options(Resume* resume, char* error);

C_LINKAGE_END
