// Reports of a run: lines on the terminal and in log.txt, and their values in log.jsonl. A function that returns false
// has written a sentence into the run folder's `error`, with which the run ends.
#pragma once
#include "evaluation.h"
#include "run_folder.h"
C_LINKAGE_BEGIN

// Prints the banner of a run: its model, whose vocabulary has V tokens, device, data, optimizer, schedule and memory,
// and what a resume has changed. The options have been resolved. The texts describe the device, the ranks (NULL: there
// is one) and the optimizer.
void report_banner(RunFolder* run, int V, const char* device, const char* ranks, const char* optimizer,
                   const MemoryPlan* plan);
// Returns a sentence, which the program keeps, about a plan for which `device` has not enough memory. It says what to
// type: --batch `fits` (0: not even one sequence does); and --recompute block, or fewer of its kept blocks, if `less`
// says that this is enough.
const char* report_lack(const Options* options, const MemoryPlan* plan, const char* device, int64_t fits, bool less);
// Returns a text, which the program keeps, that must be the same on all ranks, or they would wait for one another:
// whether there is a tokenizer, which changes options; the options but --run, --resume, --data, --val and
// --join-timeout; and checksums of the checkpoint, the data and what run_folder_open has read. A byte 1 follows each
// part, since values may have spaces.
const char* run_identity(const RunFolder* run);

// Times the steps after `from`. `from` moves after the first step and after the tenth, since early steps are slower.
typedef struct {
    int64_t first, from;
    double since, seconds;  // the clock when `from` was done; the time spent in the steps after it
} StepTimer;
// A step that is done.
typedef struct {
    double loss, norm, lr;  // of the step; loss and norm are NaN or infinite if it changed nothing
    double flops, peak;     // FLOPs of a token; FLOP/s of all ranks, 0 when unknown
    int64_t memory, used;   // bytes of the plan; bytes of the GPU in use, logged in a line of their own unless 0
    double parts_left;      // layers that kept their weights, although the step was taken
    double saturated;       // elements too large for their fp8 codes; below 0: the step was not in fp8
    bool skipped, gpu;      // it changed nothing; it was on a GPU
    StepTimer timer;
    // Set by report_step_done.
    double seconds, eta;  // of the step, and until the end; eta below 0: not known yet
} StepReport;
// Records that a step that began at `begin` is done. Returns the average seconds from one step to the next.
double step_timed(StepTimer* timer, int64_t step, double begin, double now);
// Counts a step that began at `begin`, logs it, and prints it if --print-every says so, or if it is the first or the
// last, or changed nothing. False also if the run must end because the step changed nothing: with --on-nonfinite stop,
// or after ten in a row.
bool report_step_done(RunFolder* run, StepReport* step, double begin);
// Reports a validation, and keeps the best loss so far.
bool report_validation(RunFolder* run, double loss, double seconds);
// Reports a checkpoint, which a save that began at `begin` has written if `ok`, and makes it the run's last one. With
// `prune` it removes older ones beyond --keep. Of a failed one nothing is left.
bool report_save(RunFolder* run, CheckpointWriter* writer, bool ok, double begin, bool prune);
// Reports an evaluation, outside of a run ("" as its path) on the terminal alone, and adds its scores to `out`, the
// file of --eval-out or NULL.
bool report_evaluation(RunFolder* run, const EvaluationPass* pass, FILE* out, double seconds);
// Reports the end of a run of `steps` timed steps in `seconds`; `stopped`: by a signal. False if it was `useless`.
bool report_end(RunFolder* run, bool stopped, double steps, double seconds, bool useless);

C_LINKAGE_END
