"""Source formats: how a checkpoint stores one weight, and how to get its values back. One file a kind of format.

    name         stored as                                             decoded to
    bf16         BF16 [..., n, k]                                      bf16, as it is
    fp16         F16                                                   fp16, as it is
    fp32         F32                                                   fp32, as it is
    fp8_blocks   F8_E4M3 [..., n, k] and `<key>_scale_inv` of shape    fp32: value · scale of its block
                 [..., ceil(n / block n), ceil(k / block k)]
    gptq, awq,   int4 codes, scales and zero points in tensors of      fp32: scale · (code - zero point)
    packed       their own (int4_packing.py draws them)
    q4_0, q6_k,  GGUF's quantised blocks (gguf_blocks.py and           fp32, as ggml dequantises them
    iq1_s …      gguf_book_blocks.py list them)
    made         other tensors, by a recipe of the container (made.py,   as its parts are
                 gguf_recipes.py)
    mxfp4        U8 `<key>_blocks` and `<key>_scales` (mxfp4.py)       bf16, transposed as gpt-oss has it; exact

`<key>` is the name of the weight's tensor, usually ending in `.weight`, and `<stem>` is the key without that ending.
gptq, awq, packed, made and mxfp4 have no tensor `<key>`. Other formats are recognised by the tensors they come with and
refused by name (unsupported.py). base.py has the contract, table.py the list.
"""
