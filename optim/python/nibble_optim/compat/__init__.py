"""Optimizers under the names and with the arguments of others, so that a changed import is enough:

    from nibble_optim.compat.torchao import AdamW8bit            # torchao.optim
    from nibble_optim.compat import bitsandbytes as bnb          # bnb.AdamW8bit, bnb.optim.AdamW8bit
    from nibble_optim.compat.flashoptim import FlashAdamW        # flashoptim

States have the formats of the original; results differ from it by rounding. State dicts are nibble_optim's."""
