// A preset of one's own: a row for PRESETS in optim/table.cuh. It names rows of the other tables in full; v is "none"
// for a rule that keeps no v. What --override would be, if anything, comes last.
{"mine", "adamw", "bf16+8:sr", "dyn8/64:sr", "udyn8/64:sr", "5.13 bytes a parameter, unbiased throughout"},
