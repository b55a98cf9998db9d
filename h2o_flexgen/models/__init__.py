"""Model families, and where the files of a model are.

A family is one module, named after its `model_type`, of pure functions. A new one is a file, an entry in
`registry.FAMILIES` and its tests. B sequences, T tokens, E hidden width, V words:

    spec(config) -> ModelSpec       raises UserError: a key that is missing, or sizes that do not fit
    named() -> {name: config}       models whose sizes are built in, by their names on the hub
    tensors(spec) -> [Layer]        the embedding, the blocks, the head
    embed(spec, w, gather, ids, positions)      ids, positions (B, T) int64 on the CPU -> hidden (B, T, E)
    block(spec, w, hidden, positions, attend)   hidden (B, T, E), positions (B, T) -> hidden (B, T, E)
    logits(spec, w, hidden)                     last hidden states (B, E), contiguous -> logits (B, V)
"""
