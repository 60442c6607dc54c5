/* Means of rows of vectors, in one pass over the vectors.
 *
 * NumPy needs several calls for each row, and then one conversion; a row of a sentence is too short for them. A sum is in
 * double, token after token, so the bits of a mean depend on its own row alone, and not on the chunks that it came in.
 */
#include "_kernels.h"

static int holds_doubles(const Py_buffer *buffer)
{
    return (uintptr_t)buffer->buf % 8 == 0 && buffer->len % 8 == 0;
}

/* Check sizes, alignment and lengths. Return 1, or set an exception and return 0. */
static int fits(const Py_buffer *vectors, const Py_buffer *lengths, const Py_buffer *place, const Py_buffer *total,
                const Py_buffer *means)
{
    Py_ssize_t width = total->len / 8, rows = lengths->len / 8;
    if (!width || !holds_doubles(lengths) || !holds_doubles(place) || !holds_doubles(total) || place->len != 16 ||
        (uintptr_t)vectors->buf % 4 || (uintptr_t)means->buf % 4 || vectors->len % (4 * width) ||
        means->len / (4 * width) != rows || means->len % (4 * width)) {
        PyErr_Format(PyExc_ValueError, "width: got %zd, with %zd bytes of vectors, %zd of lengths, %zd of place and %zd of "
                     "means, expected whole vectors, one mean for each length, and a place of 16 bytes",
                     width, vectors->len, lengths->len, place->len, means->len);
        return 0;
    }
    const int64_t *length = lengths->buf, *at = place->buf;
    int64_t left = vectors->len / (4 * width) + at[1];
    for (Py_ssize_t row = at[0] < 0 || at[1] < 0 ? rows : at[0]; left > 0 && row < rows && length[row] > 0; row++)
        left -= length[row] < left ? length[row] : left;
    if (left > 0) {
        PyErr_Format(PyExc_ValueError, "vectors: got %zd, expected at most as many as the rows from %lld on have",
                     vectors->len / (4 * width), (long long)at[0]);
        return 0;
    }
    return 1;
}

/* `place` is the current row, and the number of its vectors in `total`. */
static void add(float *restrict means, double *restrict total, int64_t *place, const float *vector, const float *end,
                const int64_t *lengths, Py_ssize_t width)
{
    int64_t row = place[0], count = place[1];
    for (; vector < end; vector += width) {
        if (count++)
            for (Py_ssize_t column = 0; column < width; column++)
                total[column] += vector[column];
        else
            for (Py_ssize_t column = 0; column < width; column++)
                total[column] = 0.0 + vector[column]; /* not -0.0, as in NumPy */
        if (count == lengths[row]) {
            for (Py_ssize_t column = 0; column < width; column++)
                means[row * width + column] = (float)(total[column] / (double)count);
            row++;
            count = 0;
        }
    }
    place[0] = row;
    place[1] = count;
}

PyObject *add_to_means(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer vectors, lengths, place, total, means;
    if (!PyArg_ParseTuple(arguments, "y*y*w*w*w*", &vectors, &lengths, &place, &total, &means))
        return NULL;
    int right = fits(&vectors, &lengths, &place, &total, &means);
    if (right)
        add(means.buf, total.buf, place.buf, vectors.buf, (const float *)((const char *)vectors.buf + vectors.len),
            lengths.buf, total.len / 8);
    PyBuffer_Release(&vectors);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&place);
    PyBuffer_Release(&total);
    PyBuffer_Release(&means);
    return right ? Py_NewRef(Py_None) : NULL;
}
