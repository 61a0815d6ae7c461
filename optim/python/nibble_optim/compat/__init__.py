"""Optimizers with the names and arguments of other packages, so that only the import has to change:

    from nibble_optim.compat.torchao import AdamW8bit            # torchao.optim
    from nibble_optim.compat import bitsandbytes as bnb          # bnb.AdamW8bit, bnb.optim.AdamW8bit
    from nibble_optim.compat.flashoptim import FlashAdamW        # flashoptim

States have the original's formats; results differ from it by rounding. State dicts are nibble_optim's."""
