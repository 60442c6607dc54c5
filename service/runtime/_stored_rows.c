/* Copy the stored bytes of rows of large tables. Rows are prefetched PREFETCH_ROWS iterations ahead: they are short, and
 * hardware prefetchers cannot predict random rows.
 */
#include "_kernels.h"

enum { PREFETCH_ROWS = 8, GIL_BYTES = 1 << 16 };

/* A table of rows in parts, one part after another. `first` is the number of the first row of each part. */
typedef struct {
    Py_ssize_t row_bytes, rows, count;
    Py_buffer *parts;
    Py_ssize_t *first;
} Table;

static const char TABLE[] = "preblock.table";

static void free_table(Table *table)
{
    for (Py_ssize_t i = 0; i < table->count; i++)
        PyBuffer_Release(&table->parts[i]);
    PyMem_Free(table->parts);
    PyMem_Free(table->first);
    PyMem_Free(table);
}

static void close_table(PyObject *capsule)
{
    free_table(PyCapsule_GetPointer(capsule, TABLE));
}

PyObject *open_table(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *parts;
    Py_ssize_t row_bytes;
    if (!PyArg_ParseTuple(arguments, "O!n", &PyTuple_Type, &parts, &row_bytes))
        return NULL;
    Py_ssize_t count = PyTuple_Size(parts);
    Table *table = PyMem_Calloc(1, sizeof *table);
    if (!table)
        return PyErr_NoMemory();
    table->row_bytes = row_bytes;
    table->parts = PyMem_Calloc(count + 1, sizeof *table->parts);
    table->first = PyMem_Calloc(count + 1, sizeof *table->first);
    PyObject *capsule = NULL;
    if (!table->parts || !table->first) {
        PyErr_NoMemory();
    } else {
        while (table->count < count) {
            Py_buffer *part = &table->parts[table->count];
            if (PyObject_GetBuffer(PyTuple_GetItem(parts, table->count), part, PyBUF_SIMPLE))
                break;
            table->first[table->count++] = table->rows;
            if (row_bytes < 1 || !part->len || part->len % row_bytes) {
                PyErr_Format(PyExc_ValueError, "row_bytes: got %zd, with a part of %zd bytes, expected whole rows",
                             row_bytes, part->len);
                break;
            }
            table->rows += part->len / row_bytes;
        }
        if (!PyErr_Occurred() && !count)
            PyErr_SetString(PyExc_ValueError, "parts: got none, expected at least one");
        if (!PyErr_Occurred())
            capsule = PyCapsule_New(table, TABLE, close_table);
    }
    if (!capsule)
        free_table(table);
    return capsule;
}

static const char *row_at(const Table *table, int64_t id)
{
    Py_ssize_t part = 0;
    for (Py_ssize_t left = table->count; left > 1; left -= left / 2)
        part = table->first[part + left / 2] <= id ? part + left / 2 : part;
    return (const char *)table->parts[part].buf + (id - table->first[part]) * table->row_bytes;
}

/* Ids of `heads` rows of the first table, then of as many of the next, and of the first again after the last. */
static void copy_rows(char *out, const void *ids, Py_ssize_t rows, const Table *const *tables, Py_ssize_t count,
                      Py_ssize_t heads)
{
    const char *ahead[PREFETCH_ROWS];
    Py_ssize_t size = tables[0]->row_bytes, table = 0, head = 0;
    for (Py_ssize_t i = 0; i < rows + PREFETCH_ROWS; i++) {
        const char **slot = &ahead[i % PREFETCH_ROWS];
        if (i >= PREFETCH_ROWS) {
            Py_ssize_t byte = 0; /* blocks of a constant size, because a call of memcpy for each row takes longer */
            for (; byte + 32 <= size; byte += 32)
                memcpy(out + byte, *slot + byte, 32);
            if (byte < size)
                memcpy(out + byte, *slot + byte, size - byte);
            out += size;
        }
        if (i < rows) {
            *slot = row_at(tables[table], id_at(ids, i));
            for (Py_ssize_t byte = 0; byte < size + CACHE_LINE_BYTES; byte += CACHE_LINE_BYTES)
                __builtin_prefetch(*slot + (byte < size ? byte : size - 1), 0, 2);
            if (++head == heads) {
                head = 0;
                table = table + 1 == count ? 0 : table + 1;
            }
        }
    }
}

/* Check sizes and ids. Return 1, or set an exception and return 0. */
static int fits_tables(const Py_buffer *ids, const Py_buffer *out, const Table *const *tables, Py_ssize_t count,
                       Py_ssize_t heads)
{
    Py_ssize_t rows = ids->len / 8;
    int even = count > 0 && heads > 0 && heads <= PY_SSIZE_T_MAX / count && ids->len % 8 == 0 && rows % (count * heads) == 0;
    for (Py_ssize_t i = 0; even && i < count; i++)
        even = tables[i]->row_bytes == tables[0]->row_bytes;
    if (!even || out->len % tables[0]->row_bytes || out->len / tables[0]->row_bytes != rows) {
        PyErr_Format(PyExc_ValueError, "heads: got %zd, with %zd tables, %zd bytes of ids and %zd of output, expected tables "
                     "of one row size, as many ids for each, and one output row for each id",
                     heads, count, ids->len, out->len);
        return 0;
    }
    Py_ssize_t i = 0;
    for (Py_ssize_t table = 0; i < rows; table = table + 1 == count ? 0 : table + 1) {
        Py_ssize_t most = tables[table]->rows;
        for (Py_ssize_t end = i + heads; i < end; i++) {
            int64_t id = id_at(ids->buf, i);
            if (id < 0 || id >= most) {
                PyErr_Format(PyExc_IndexError, "id: got %lld, expected 0 to %zd", (long long)id, most - 1);
                return 0;
            }
        }
    }
    return 1;
}

/* Run `copy_rows`. Return 1, or set an exception and return 0 if a table is no longer mapped to a file. */
static int copy_guarded(const Py_buffer *out, const Py_buffer *ids, const Table *const *tables, Py_ssize_t count,
                        Py_ssize_t heads)
{
    /* A large call may wait for the disk, so other threads go on. */
    PyThreadState *volatile state = out->len > GIL_BYTES ? PyEval_SaveThread() : NULL;
    guarded_end = (const char *)UINTPTR_MAX;
    guarded_begin = NULL;
    int complete = !sigsetjmp(after_fault, 0);
    if (complete)
        copy_rows(out->buf, ids->buf, ids->len / 8, tables, count, heads);
    guarded_begin = guarded_end = NULL;
    if (state)
        PyEval_RestoreThread(state);
    if (!complete)
        PyErr_SetString(PyExc_BufferError, "table: got a file that has become shorter, expected all its rows");
    return complete;
}

PyObject *gather_rows(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer ids, out;
    PyObject *capsules;
    Py_ssize_t heads;
    if (!PyArg_ParseTuple(arguments, "y*O!w*n", &ids, &PyTuple_Type, &capsules, &out, &heads))
        return NULL;
    Py_ssize_t count = PyTuple_Size(capsules);
    const Table **tables = PyMem_Calloc(count + 1, sizeof *tables);
    int right = tables != NULL;
    if (!right)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; right && i < count; i++)
        right = (tables[i] = PyCapsule_GetPointer(PyTuple_GetItem(capsules, i), TABLE)) != NULL;
    right = right && fits_tables(&ids, &out, tables, count, heads);
    if (right && ids.len)
        right = copy_guarded(&out, &ids, tables, count, heads);
    PyMem_Free(tables);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&out);
    return right ? Py_NewRef(Py_None) : NULL;
}
