// A preset of one's own, a line for OPTIM_PRESETS in optim/table.cuh: its name, a rule, the storage of weights, m and v
// ("none" where the rule keeps no v), and when to use it.
ROW("mine", "adamw", "bf16+8:sr", "lin8/256:dither", "sqrt4/128:dither", "4.5 bytes a parameter, unbiased throughout")
