// Resuming a run: chooses the checkpoint, and merges its options with those that were typed. Functions that return
// false have written a sentence into `error`.
#pragma once
#include "run_folder.h"
C_LINKAGE_BEGIN

// Options that are merged with a checkpoint's.
typedef struct {
    Options* options;
    char from[RUN_PATH_BYTES];  // the checkpoint to continue from; "": a new run
    Json* state;                // its state.json; NULL: none. The caller frees it
    const Json* saved;          // "options" of state.json
    const char* changed;        // what has changed, for the banner: " --lr 0.1 (was 0.2); the data: ..."; NULL: nothing
} Resume;

// Finds the checkpoint that --resume names: off, auto (the newest of --run), a run folder, or a checkpoint. Writes its
// path to `from`, and holds the folder in which the run goes on: that of --run, which must be the checkpoint's own or
// have no run in it, or without --run the checkpoint's own, which becomes --run. If the user named the checkpoint
// itself, newer ones there are an error. One process calls it.
bool resume_find(Resume* resume, RunFolder* run, char* error);
// Opens `state` if resume_find has not, takes the checkpoint's options, and sets the run's folders of weights: the
// checkpoint, or else that of --model. Refuses options that mean something else than training, but would train.
bool resume_take(Resume* resume, RunFolder* run, char* error);
// Sets the run's state to the checkpoint's, or to that of a new run. Notes in `changed` if its data is not the same, or
// if the next learning rate is larger than the checkpoint's would be: it then rises as in a warm-up.
void resume_state(Resume* resume, RunFolder* run);
// Takes options that were not typed from the checkpoint, except --override, which the optimizer merges, and those of
// one start of the program: its files of prompts and evaluations may be a stranger's choice. Lists what differs.
// Options that determine the model's shape must be the same.
bool resume_options(Resume* resume, char* error);

C_LINKAGE_END
