"""How a loss adds up over the parts of a batch: of a library's head by its name, of a user's loss by what is seen."""
