/* The sum of `_fused_embedding.c` on an NVIDIA GPU: token row * scale + position row, one block for each token.
 *
 * `_fused_embedding.ptx` is this file in the language of the driver; `make ptx` compiles it.
 * A row is as wide as `width` values of the type Values.
 */
__device__ float sum(float row, float scale, float position)
{
    return __fadd_rn(__fmul_rn(row, scale), position); /* rounded twice, as in a graph */
}

__device__ float4 sum(float4 row, float scale, float4 position)
{
    return make_float4(sum(row.x, scale, position.x), sum(row.y, scale, position.y), sum(row.z, scale, position.z),
                       sum(row.w, scale, position.w));
}

/* Row i of the batch takes position offsets[i * stride] + its index in the row: a stride of 0 gives all rows the same. */
template <typename Values>
__device__ void add(const long long *ids, unsigned length, const long long *offsets, unsigned stride,
                    const Values *__restrict__ table, float scale, const Values *__restrict__ positions, unsigned width,
                    Values *__restrict__ out)
{
    unsigned token = blockIdx.x;
    const Values *row = table + ids[token] * width;
    const Values *position = positions + (offsets[token / length * stride] + token % length) * width;
    out += (unsigned long long)token * width;
    for (unsigned column = threadIdx.x; column < width; column += blockDim.x)
        out[column] = sum(row[column], scale, position[column]);
}

extern "C" __global__ void add_rows(const long long *ids, unsigned length, const long long *offsets, unsigned stride,
                                    const float *table, float scale, const float *positions, unsigned width, float *out)
{
    add(ids, length, offsets, stride, table, scale, positions, width, out);
}

/* Four values at once, if all rows begin at multiples of 16 bytes. */
extern "C" __global__ void add_rows_by_4(const long long *ids, unsigned length, const long long *offsets, unsigned stride,
                                         const float4 *table, float scale, const float4 *positions, unsigned width,
                                         float4 *out)
{
    add(ids, length, offsets, stride, table, scale, positions, width, out);
}
