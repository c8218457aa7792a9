// native/cuda/int4_linear_sm90.cu holds kernels only, which nothing but native/cuda/int4_linear.cu calls.
