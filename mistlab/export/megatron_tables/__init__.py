"""Tables of names: options of Megatron-LM and its relatives, their programs, their tokenizers."""
