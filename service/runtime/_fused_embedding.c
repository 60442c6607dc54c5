/* Rows of a table of tokens and vectors of positions, added in one pass: what two operators of a graph do in two.
 *
 * What the first writes, the second reads and writes again: of 786 kB that is more than the second cache of a processor
 * holds beside the rest. And rows lie anywhere in the table, where no processor foresees them: they are asked for a few
 * rows before they are added.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { AHEAD = 4, LINE = 64 };  /* rows; bytes of a line of the caches */

/* Ids lie where they came in a request, at any byte. */
static int64_t id_at(const void *ids, Py_ssize_t i)
{
    int64_t id;
    memcpy(&id, (const char *)ids + 8 * i, 8);
    return id;
}

static void add(float *restrict out, const float *table, float scale, const void *ids, Py_ssize_t tokens,
                const float *positions, Py_ssize_t placed, Py_ssize_t width)
{
    for (Py_ssize_t i = 0; i < tokens + AHEAD; i++) {
        if (i < tokens) {
            const char *next = (const char *)(table + id_at(ids, i) * width);
            for (Py_ssize_t byte = 0; byte < 4 * width; byte += LINE)
                __builtin_prefetch(next + byte, 0, 2);
        }
        if (i >= AHEAD) {
            const float *row = table + id_at(ids, i - AHEAD) * width;
            const float *position = positions + (i - AHEAD) % placed * width;
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

/* Return whether the sizes fit and every id names a row; else an exception is set. */
static int fits(const Py_buffer *ids, const Py_buffer *table, const Py_buffer *positions, const Py_buffer *out,
                Py_ssize_t width)
{
    Py_ssize_t size = width > 0 && width <= table->len ? 4 * width : 0, tokens = ids->len / 8;
    if (!size || ids->len % 8 || table->len % size || positions->len % size || out->len != tokens * size ||
        (tokens && (!positions->len || tokens % (positions->len / size)))) {
        PyErr_Format(PyExc_ValueError, "width: got %zd, with %zd bytes of ids, %zd of the table, %zd of positions and "
                     "%zd of vectors, expected whole rows, as many vectors as ids, and positions for all of them",
                     width, ids->len, table->len, positions->len, out->len);
        return 0;
    }
    if (!aligned(table) || !aligned(positions) || !aligned(out)) {
        PyErr_SetString(PyExc_ValueError, "floats: got an odd address, expected a multiple of 4");
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

static PyObject *add_rows(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer ids, table, positions, out;
    Py_ssize_t width;
    float scale;
    if (!PyArg_ParseTuple(arguments, "y*y*fy*w*n", &ids, &table, &scale, &positions, &out, &width))
        return NULL;
    int right = fits(&ids, &table, &positions, &out, width);
    if (right && ids.len)
        add(out.buf, table.buf, scale, ids.buf, ids.len / 8, positions.buf, positions.len / (4 * width), width);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&table);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&out);
    return right ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"add_rows", add_rows, METH_VARARGS, "add_rows(ids, table, scale, positions, out, width): write rows times scale, "
     "each plus its position, into out"},
    {0},
};

static PyModuleDef_Slot slots[] = {{0}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "preblock.service.runtime._fused_embedding", 0, 0, methods, slots, 0, 0, 0};

PyMODINIT_FUNC PyInit__fused_embedding(void)
{
    return PyModuleDef_Init(&module);
}
