// Resuming a run: chooses the checkpoint, and merges its options with those that were typed. Functions that return
// false have written a sentence into `error`.
#pragma once
#include "run_folder.h"
C_LINKAGE_BEGIN

// Finds the checkpoint that --resume names: off, auto (the newest of --run), a run folder, or a checkpoint. Writes its
// path to `checkpoint`, and holds the folder in which the run goes on: that of --run, which must be the checkpoint's
// own or have no run in it, or without --run the checkpoint's own, which becomes --run. If the user named the
// checkpoint itself, newer ones there are an error. One process calls it.
bool resume_find(RunFolder* run, char* error);
// Opens `resumed` if resume_find has not, takes the checkpoint's options, and sets the run's folder of weights: the
// checkpoint, or else that of --model. Refuses options that mean something else than training, but would train.
bool resume_take(RunFolder* run, char* error);
// Sets the run's state to the checkpoint's, or to that of a new run. Notes in `changed` if its data is not the same, or
// if the next learning rate is larger than the checkpoint's would be: it then rises. False if data cannot be read.
bool resume_state(RunFolder* run);
// Takes options that were not typed from the checkpoint, except --override, which the optimizer merges, and those of
// one start of the program: its files of prompts and evaluations may be a stranger's choice. Lists what differs.
// Options that determine the model's shape must be the same.
bool resume_options(RunFolder* run, char* error);

C_LINKAGE_END
