/* Gather rows of a token table, scale them, and add position vectors, in one pass over the output.
 *
 * The graph does this with two operators: Gather writes an intermediate tensor, and Add reads it again. Above the size of the
 * L2 cache (786 kB for 256 tokens of width 768) the second pass costs memory bandwidth. Rows are prefetched PREFETCH_ROWS
 * iterations ahead, because hardware prefetchers cannot predict random rows.
 */
#include "_kernels.h"

enum { PREFETCH_ROWS = 4 };

/* Position vectors repeat for each batch item: token i takes position i % position_count. */
static void add(float *restrict out, const float *table, float scale, const void *ids, Py_ssize_t tokens,
                const float *positions, Py_ssize_t position_count, Py_ssize_t width)
{
    for (Py_ssize_t i = 0; i < tokens + PREFETCH_ROWS; i++) {
        if (i < tokens) {
            const char *next = (const char *)(table + id_at(ids, i) * width);
            for (Py_ssize_t byte = 0; byte < 4 * width; byte += CACHE_LINE_BYTES)
                __builtin_prefetch(next + byte, 0, 2);
        }
        if (i >= PREFETCH_ROWS) {
            const float *row = table + id_at(ids, i - PREFETCH_ROWS) * width;
            const float *position = positions + (i - PREFETCH_ROWS) % position_count * width;
            for (Py_ssize_t column = 0; column < width; column++)
                out[column] = row[column] * scale + position[column];
            out += width;
        }
    }
}

static int aligned(const Py_buffer *floats)
{
    return (uintptr_t)floats->buf % 4 == 0;
}

/* Check sizes, alignment and ids. Return 1, or set an exception and return 0. */
static int fits(const Py_buffer *ids, const Py_buffer *table, const Py_buffer *positions, const Py_buffer *out,
                Py_ssize_t width)
{
    Py_ssize_t size = width > 0 && width <= table->len ? 4 * width : 0, tokens = ids->len / 8;
    if (!size || ids->len % 8 || table->len % size || positions->len % size || out->len != tokens * size ||
        (tokens && (!positions->len || tokens % (positions->len / size)))) {
        PyErr_Format(PyExc_ValueError, "width: got %zd, with %zd bytes of ids, %zd of the table, %zd of positions and "
                     "%zd of output, expected whole rows, one output row for each id, and a number of positions that "
                     "divides the number of ids",
                     width, ids->len, table->len, positions->len, out->len);
        return 0;
    }
    if (!aligned(table) || !aligned(positions) || !aligned(out)) {
        PyErr_SetString(PyExc_ValueError, "address: got unaligned floats, expected a multiple of 4 bytes");
        return 0;
    }
    for (Py_ssize_t i = 0; i < tokens; i++) {
        int64_t id = id_at(ids->buf, i);
        if (id < 0 || id >= table->len / size) {
            PyErr_Format(PyExc_IndexError, "id: got %lld, expected 0 to %zd", (long long)id, table->len / size - 1);
            return 0;
        }
    }
    return 1;
}

/* Run `add`. Return 1, or set an exception and return 0 if the output is no longer mapped to a file. */
static int add_guarded(const Py_buffer *out, const Py_buffer *table, float scale, const Py_buffer *ids,
                       const Py_buffer *positions, Py_ssize_t width)
{
    guarded_end = (const char *)out->buf + out->len;
    guarded_begin = out->buf;
    int complete = !sigsetjmp(after_fault, 0); /* SA_NODEFER: the signal is not blocked, so no mask is saved */
    if (complete)
        add(out->buf, table->buf, scale, ids->buf, ids->len / 8, positions->buf, positions->len / (4 * width), width);
    else
        PyErr_SetString(PyExc_BufferError, "output: got memory that has become shorter, expected memory to write to");
    guarded_begin = guarded_end = NULL;
    return complete;
}

PyObject *add_rows(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer ids, table, positions, out;
    Py_ssize_t width;
    float scale;
    if (!PyArg_ParseTuple(arguments, "y*y*fy*w*n", &ids, &table, &scale, &positions, &out, &width))
        return NULL;
    int right = fits(&ids, &table, &positions, &out, width);
    if (right && ids.len)
        right = add_guarded(&out, &table, scale, &ids, &positions, width);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&table);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&out);
    return right ? Py_NewRef(Py_None) : NULL;
}
