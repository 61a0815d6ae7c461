// Reports of a run: lines on the terminal and in log.txt, and their values in log.jsonl. A function that returns false
// has written a sentence into the run folder's `error`, with which the run ends.
#pragma once
#include "checkpoint.h"
#include "evaluation.h"
#include "loader.h"
#include "run_folder.h"
#include "schedule.h"
C_LINKAGE_BEGIN

// Facts that the banner states beside the options.
typedef struct {
    char device[256], optim[256];      // descriptions
    const char *ranks, *source;        // of the ranks; "" for one alone
    int world;                         // ranks
    int64_t windows, parameters;       // of the training data; of the model
    double usual_lr, usual_lr_of_any;  // of the rule and this model's size; of a rule that is not known
    bool trained;                      // the run begins with the weights of --model
    MemoryPlan memory;
    int64_t available;    // bytes
    const char* changed;  // options that differ from the checkpoint's
} PlanReport;
// The banner, of the options as resolved; V is the model's vocabulary.
void report_plan(RunFolder* run, const PlanReport* plan, const Dataset* train, const Dataset* val, int V);
// A row of --fit on stdout: the largest batch that fits into `memory` bytes and its bytes by kind, or those of one
// sequence where none fits; a title before the first.
void report_fit(const char* model, int64_t parameters, int T, const char* preset, const char* recompute,
                const Planner* planner, int64_t memory, bool first);
// Returns a text that must be the same on all ranks: the options, but for names of files, and the data's sizes and
// checksums, which are made here. It lives as long as the program; NULL with a sentence where data cannot be read.
const char* run_identity(RunFolder* run, Dataset* train, Dataset* val);
// The sentence where the weights of several ranks differ. It lives as long as the program.
const char* report_weights_differ(const RunFolder* run);
// True, and a line says so, if the run that `checkpoint` holds is at its last step already.
bool report_already_done(RunFolder* run, const char* checkpoint);
// A notice where new weights begin a built-in shape although a model lies in a folder of the same name.
void report_new_weights(RunFolder* run, const char* model);

// A step that is done.
typedef struct {
    double loss, norm, lr;  // of the step; loss and norm NaN or infinite where it changed nothing
    double flops, peak;     // FLOPs of a token; FLOP/s of all ranks, 0 when unknown
    int64_t memory, used;   // bytes of the plan; of the GPU that are taken, for a line of their own, or 0
    double parts_left;      // layers that kept their weights, although the step was taken
    double saturated;       // elements too large for their fp8 codes; below 0: the step was not in fp8
    bool skipped, gpu;      // it changed nothing; it was on a GPU
    // Set by report_step_done.
    double seconds, eta;  // of the step, and until the end; eta below 0: not known yet
    bool first, last;     // of this start's steps; of the run's
} StepReport;
// The time of the steps after `from`, which moves when one step is done and when ten are, since these are slower.
typedef struct {
    int64_t first, from;
    double since, seconds;  // the clock when `from` was done; spent in the steps after it
} StepTimer;
// Takes note that a step, which began at `begin`, is done. Returns the seconds from one step to the next.
double step_timed(StepTimer* timer, int64_t step, double begin, double now);
// Counts a step that began at `begin`, writes it into log.jsonl, and prints it as --print-every says or if it is first
// or last, or changed nothing. False also where a step that changed nothing ends the run: by --on-nonfinite, or the
// tenth in a row.
bool report_step_done(RunFolder* run, StepReport* step, double begin, StepTimer* timer);
// Also sets the best loss so far.
bool report_validation(RunFolder* run, double loss, double bytes_per_token, double seconds);
// A SampleDone and an EvaluationDone for `run`, a RunFolder. Where they fail there is a sentence in its `error`.
void report_sample(void* run, int index, const char* prompt, const char* text, size_t bytes);
void report_evaluation(void* run, const Evaluation* evaluation, const EvaluationResult* result, double seconds);
// Reports the end of a run of `steps` steps in `seconds`, which a signal may have `stopped`. False if it was `useless`.
bool report_end(RunFolder* run, bool stopped, double steps, double seconds, bool useless);

C_LINKAGE_END
