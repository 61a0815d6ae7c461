// The checkpoints of a run folder: RUN/step_00001000 holds files and a state.json with the size and CRC-32C of each and
// a checksum of its own. A checkpoint is written into step_00001000.tmp, synced and renamed, so a folder without .tmp
// is whole unless the disk damaged it, which the checksums tell. What the files mean is the trainer's business.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "files.h"
#include "json.h"
#ifdef __cplusplus
extern "C" {
#endif

// The path from the root; glob patterns stay what they are. The caller owns it.
char* path_absolute(const char* path);
// The same for each path of a list with commas.
char* paths_absolute(const char* list);
// The folder that holds `path`, "." when none is named; returns `parent`.
const char* folder_parent(const char* path, char* parent, size_t bytes);

// The steps of all checkpoints in a run folder, newest first; returns how many. Caller frees *steps.
int checkpoint_list(const char* run_folder, int64_t** steps);
// The name of a step's folder: RUN/step_%08lld.
void checkpoint_name(const char* run_folder, int64_t step, char* path, size_t bytes);
// A file of a checkpoint as it was written.
typedef struct {
    const char* name;
    uint32_t crc;
    int64_t bytes;   // -1: nobody summed it while writing (a small file): checkpoint_seal reads it, if it is there
    bool nonfinite;  // it was not written to the end, because a value is not finite
} CheckpointFile;
// Completes state.json: `text` is its beginning, an open object that ends in ",\n"; "files" with sums and the seal
// follow.
bool checkpoint_seal(const char* folder, const char* text, const CheckpointFile* files, int count, char* error);
// Puts FOLDER.tmp in FOLDER's place. Where FOLDER exists already the two swap in one act and the old one is removed, so
// that a whole one stands there at any moment.
bool checkpoint_commit(const char* folder, char* error);
// state.json's tree (caller frees) of a checkpoint that another rank has verified, or NULL and a sentence.
Json* checkpoint_state(const char* folder, char* error);
// Whether all files of a checkpoint are as they were written, optimizer.safetensors aside, which a model does not need.
bool checkpoint_model_whole(const char* folder, char* error);
// Whether those files of a run folder that a checkpoint has copies of (the tokenizer's) are as state.json says.
bool checkpoint_has_copies(const char* checkpoint, const Json* state, const char* run_folder, char* error);
// Is it whole? Every file against its sum. Returns state.json's tree (caller frees), or NULL and a sentence.
Json* checkpoint_verify(const char* folder, char* error);
// The newest whole checkpoint of a run folder into `folder`; damaged ones are named on stderr and passed over.
Json* checkpoint_newest(const char* run_folder, char* folder, size_t bytes);
// The checkpoint that --resume names: `resume` is off, auto (the newest of `run`) or a folder, a run's or, which sets
// *named_itself, a checkpoint's. Its name into `folder` and its state.json's tree into *state, NULL: begin anew.
bool checkpoint_locate(const char* resume, const char* run, char* folder, size_t bytes, bool* named_itself,
                       Json** state, char* error);
// The run folder that a checkpoint lies in; false with a sentence where that is none, as of a copied checkpoint.
bool checkpoint_run(const char* checkpoint, char* run_folder, size_t bytes, char* error);
// May a run begin in this folder (`again`: or go on there)? Not beside a model's config.json, which it would overwrite.
bool run_folder_free(const char* folder, bool again, char* error);
// Keeps other processes of this machine from training in a run folder as long as this one lives; false with a sentence
// where one does. Where the file system knows no locks there are none.
bool run_folder_lock(const char* folder, char* error);
// May a run go on from `checkpoint` in `run_folder`? That is the checkpoint's own folder, in which it is the newest, or
// one without a run. Newer ones in its own folder are damaged and were passed over: they are renamed to NAME.damaged
// when `put_aside`. With `named_itself`, the user chose this one: then newer ones make it a branch, which is refused.
bool checkpoint_continue(const char* run_folder, const char* checkpoint, bool named_itself, bool put_aside,
                         char* error);
// Removes all but the newest `keep`, never `step`'s, and leftovers of interrupted saves.
bool checkpoint_prune(const char* run_folder, int64_t keep, int64_t step, char* error);

#ifdef __cplusplus
}
#endif
