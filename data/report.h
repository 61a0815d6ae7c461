// What a run reports, out of plain numbers: lines on the terminal and in log.txt, and their values in log.jsonl. A
// function that returns false has written a sentence into `error`, with which the run ends.
#pragma once
#include "checkpoint.h"
#include "evaluation.h"
#include "loader.h"
#include "run_folder.h"
#ifdef __cplusplus
extern "C" {
#endif

// Bytes of device memory; on the CPU of this machine's.
typedef struct {
    int64_t weights, states, grads, activations, other;
    int64_t
        taken;  // before any of these: the driver's context, NCCL, and kernels that are loaded on the way; 0 on a CPU
    int64_t total;
    int64_t host;  // of this machine's memory, beside the total unless it is on a CPU
} MemoryPlan;

// What the banner says beside the options.
typedef struct {
    char device[256], ranks[256], optim[256];  // descriptions; ranks "" for one alone
    const char* source;                        // of the ranks
    int world;                                 // ranks
    int64_t windows, parameters;               // of the training data; of the model
    double usual_lr, usual_lr_of_any;          // of the rule and this model's size; of a rule that is not known
    bool trained;                              // the run begins with the weights of --model
    MemoryPlan memory;
    int64_t available;    // bytes
    const char* changed;  // options that differ from the checkpoint's
} PlanReport;
// The banner. `fields` are the options as resolved, V is the model's vocabulary.
void report_plan(RunFolder* run, const OptionTable* table, const void* fields, const PlanReport* plan,
                 const Dataset* train, const Dataset* val, int V);
// A row of --fit on stdout: the largest batch that fits (0: none does, and the plan is that of one sequence) and its
// bytes by kind; a title before the first.
void report_fit(const char* model, int64_t parameters, int T, const char* preset, const char* recompute, int64_t batch,
                const MemoryPlan* plan, bool first);
// What must be the same on all ranks: the options, and the data by its size and checksums, which are made here. The
// caller frees the text; NULL with a sentence where the data cannot be read.
char* run_identity(const OptionTable* table, const void* fields, Dataset* train, Dataset* val, char* error);
// A notice where new weights begin a built-in shape although a model lies in a folder of the same name.
void report_new_weights(RunFolder* run, const char* model);

// A step that is done.
typedef struct {
    int64_t steps, tokens, sequences;  // of the run; of a step
    double loss, norm, lr;             // of the step; loss and norm NaN or infinite where it changed nothing
    double seconds, eta;               // of the step, and until the end; eta below 0: not known yet
    double flops, peak;                // FLOPs of a token; FLOP/s of all ranks, 0 when unknown
    int64_t memory, used;              // bytes of the plan; of the GPU that are taken, for a line of their own, or 0
    double max_lr;                     // --lr
    double parts_left;                 // layers that kept their weights, although the step was taken
    double saturated;                  // elements too large for their fp8 codes; below 0: the step was not in fp8
    bool skipped, stops;               // it changed nothing; then the run ends
    bool shown;                        // on the terminal
} StepReport;
// Counts a step in `state`, writes it into log.jsonl, and prints it if it is to be shown or changed nothing. False also
// where the run ends with it, because step->stops or ten steps in a row changed nothing.
bool report_step_done(RunFolder* run, RunState* state, const StepReport* step, char* error);
// Also sets state->best_val.
bool report_validation(RunFolder* run, RunState* state, double loss, double bytes_per_token, double seconds,
                       char* error);
// A sample, the `index`th of `count`: what follows its prompt.
bool report_sample(RunFolder* run, const RunState* state, int index, int count, const char* prompt, const char* text,
                   size_t bytes, char* error);
// A task that was scored in `seconds`.
bool report_evaluation(RunFolder* run, const RunState* state, const Evaluation* evaluation,
                       const EvaluationResult* result, double seconds, char* error);
// The end of a run, which a signal may have `stopped`: `steps` steps of `tokens` each took `seconds`. False where the
// weights are `useless`; `lr` is the --lr that they had.
bool report_end(RunFolder* run, const RunState* state, bool stopped, double steps, double tokens, double seconds,
                bool useless, double lr, char* error);

// The time of the steps after `from`, which is moved when the first is done and when ten are: they are slower, the
// first most of all, which loads what the GPU runs.
typedef struct {
    int64_t first, from;
    double since, seconds;  // the clock when `from` was done; spent in the steps after it
} StepTimer;
// Step `step`, which began at `begin`, is done: seconds that one takes, with what lies between two of them.
double step_timed(StepTimer* timer, int64_t step, double begin, double now);

#ifdef __cplusplus
}
#endif
