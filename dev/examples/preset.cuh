// A preset of one's own: a row for PRESETS in optim/table.cuh. It names rows of the other tables in full; `v` is "none"
// for a rule that keeps no v, and `overrides` is what --override would be, if any.
{.name = "mine",
 .rule = "adamw",
 .weights = "bf16+8:sr",
 .m = "dyn8/64:sr",
 .v = "udyn8/64:sr",
 .note = "5.13 bytes a parameter, unbiased throughout"},
