/* Means of rows of vectors, in one pass over the vectors, or over the rows of a table that ids select.
 *
 * NumPy needs several calls for each row, and then one conversion; a row of a sentence is too short for them. A sum is in
 * double, token after token, so the bits of a mean depend on its own row alone, and not on the chunks that it came in.
 */
#include "_kernels.h"

/* Chunks of vectors come from threads, one after the other, beside an event loop that waits for the lock. */
enum { PREFETCH_ROWS = 4, GIL_BYTES = 1 << 20, CHUNK_GIL_BYTES = 1 << 16 };

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
    int64_t left = vectors->len / (4 * width), taken = at[1];
    int begun = at[0] >= 0 && taken >= 0;
    for (Py_ssize_t row = begun ? at[0] : rows; left > 0 && row < rows && length[row] > taken; row++, taken = 0)
        left -= length[row] - taken < left ? length[row] - taken : left;
    if (!begun || left > 0) {
        PyErr_Format(PyExc_ValueError, "vectors: got %zd, expected at most as many as the rows from %lld on have",
                     vectors->len / (4 * width), (long long)at[0]);
        return 0;
    }
    return 1;
}

static void add_vector(double *restrict total, const float *restrict vector, int first, Py_ssize_t width)
{
    if (first)
        for (Py_ssize_t column = 0; column < width; column++)
            total[column] = 0.0 + vector[column]; /* not -0.0, as in NumPy */
    else
        for (Py_ssize_t column = 0; column < width; column++)
            total[column] += vector[column];
}

static void divide(float *restrict mean, const double *restrict total, int64_t count, Py_ssize_t width)
{
    for (Py_ssize_t column = 0; column < width; column++)
        mean[column] = (float)(total[column] / (double)count);
}

/* `place` is the current row, and the number of its vectors in `total`. */
static void add(float *means, double *total, int64_t *place, const float *vector, const float *end, const int64_t *lengths,
                Py_ssize_t width)
{
    int64_t row = place[0], count = place[1];
    for (; vector < end; vector += width) {
        add_vector(total, vector, !count++, width);
        if (count == lengths[row]) {
            divide(means + row++ * width, total, count, width);
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
    if (right) {
        PyThreadState *state = vectors.len > CHUNK_GIL_BYTES ? PyEval_SaveThread() : NULL;
        add(means.buf, total.buf, place.buf, vectors.buf, (const float *)((const char *)vectors.buf + vectors.len),
            lengths.buf, total.len / 8);
        if (state)
            PyEval_RestoreThread(state);
    }
    PyBuffer_Release(&vectors);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&place);
    PyBuffer_Release(&total);
    PyBuffer_Release(&means);
    return right ? Py_NewRef(Py_None) : NULL;
}

static void prefetch(const float *vector, Py_ssize_t width)
{
    for (Py_ssize_t column = 0; column < width; column += CACHE_LINE_BYTES / 4)
        __builtin_prefetch(vector + column, 0, 2);
}

static void average(float *means, double *total, const float *table, const void *ids, Py_ssize_t tokens,
                    const int64_t *lengths, Py_ssize_t rows, Py_ssize_t width)
{
    for (Py_ssize_t row = 0, i = 0; row < rows; row++, means += width) {
        for (int64_t count = 0; count < lengths[row]; count++, i++) {
            if (i + PREFETCH_ROWS < tokens)
                prefetch(table + id_at(ids, i + PREFETCH_ROWS) * width, width);
            add_vector(total, table + id_at(ids, i) * width, !count, width);
        }
        divide(means, total, lengths[row], width);
    }
}

/* Return the width of the means; check sizes, alignment, lengths and ids, or set an exception and return 0. */
static Py_ssize_t check_rows(const Py_buffer *ids, const Py_buffer *lengths, const Py_buffer *table, const Py_buffer *means)
{
    Py_ssize_t rows = lengths->len / 8, tokens = ids->len / 8, width = rows ? means->len / (4 * rows) : 0;
    int64_t left = tokens;
    if (width && holds_doubles(lengths))
        for (Py_ssize_t row = 0; row < rows; row++) {
            int64_t length = ((const int64_t *)lengths->buf)[row];
            left = length > 0 && length <= left ? left - length : -1;
        }
    if (!width || left || !holds_doubles(lengths) || ids->len % 8 || means->len != 4 * rows * width ||
        table->len % (4 * width) || (uintptr_t)table->buf % 4 || (uintptr_t)means->buf % 4) {
        PyErr_Format(PyExc_ValueError, "lengths: got %zd rows, with %zd bytes of ids, %zd of the table and %zd of means, "
                     "expected the positive lengths of rows of all ids, whole rows of the table, and one mean for each row",
                     rows, ids->len, table->len, means->len);
        return 0;
    }
    for (Py_ssize_t i = 0; i < tokens; i++) {
        int64_t id = id_at(ids->buf, i);
        if (id < 0 || id >= table->len / (4 * width)) {
            PyErr_Format(PyExc_IndexError, "id: got %lld, expected 0 to %zd", (long long)id, table->len / (4 * width) - 1);
            return 0;
        }
    }
    return width;
}

PyObject *average_rows(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer ids, lengths, table, means;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*", &ids, &lengths, &table, &means))
        return NULL;
    Py_ssize_t width = check_rows(&ids, &lengths, &table, &means);
    double *total = width ? PyMem_Malloc(8 * width) : NULL;
    if (total) {
        PyThreadState *state = ids.len / 8 * width > GIL_BYTES / 4 ? PyEval_SaveThread() : NULL;
        average(means.buf, total, table.buf, ids.buf, ids.len / 8, lengths.buf, lengths.len / 8, width);
        if (state)
            PyEval_RestoreThread(state);
        PyMem_Free(total);
    } else if (width)
        PyErr_NoMemory();
    PyBuffer_Release(&ids);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&table);
    PyBuffer_Release(&means);
    return total ? Py_NewRef(Py_None) : NULL;
}
