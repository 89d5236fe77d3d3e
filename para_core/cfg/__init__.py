"""CFG over ranks: the rounds of model calls that ranks share, and the exchange of their outputs."""
