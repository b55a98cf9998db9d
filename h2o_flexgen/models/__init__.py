"""Model families, and the files of a model.

A family is one module of pure functions, named after its `model_type`. A new one is a file, an entry in
`registry.FAMILIES` and its tests. N tokens, B texts, E hidden width, V words:

    spec(config) -> ModelSpec       raises UserError for missing keys and sizes that contradict each other
    named() -> {name: config}       models whose sizes are built in, by their names on the hub
    tensors(spec) -> [Layer]        the embedding, the blocks, the head
    embed(spec, w, gather, ids, positions)      ids (N,) int64 on the CPU -> hidden (N, E)
    block(spec, w, hidden, positions, attend)   hidden (N, E) -> hidden (N, E)
    final_states(spec, w, hidden)               last hidden states (N, E) -> what the head reads (N, E), after the norm
    logits(spec, w, hidden)                     last hidden states (B, E), contiguous -> logits (B, V)

Layers with a mixture of experts (`Layer.experts`) have three functions instead of `block`; the engine adds what the
experts return to the hidden states:

    attention(spec, w, hidden, positions, attend)   hidden (N, E) -> hidden (N, E)
    route(spec, w, hidden)                          -> x (N, E), which experts read, and the `Routing` of all tokens
    expert(spec, w, x)                              rows of x (n, E) -> (n, E), by the tensors of one expert

and one more if they add something to that (`Layer.after`), which takes the sum (N, E) of what the experts return:

    join(spec, w, hidden, x, total)                 -> hidden (N, E)

A family whose layers differ makes its spec with `spec.of_layers`; these functions get the layer's own.
"""
