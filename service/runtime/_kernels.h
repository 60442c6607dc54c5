/* Common parts of the kernels.
 *
 * An output, or a stored table, may lie in a mapped file that others write. If it becomes shorter, an access raises SIGBUS.
 * The handler leaves the loop then, and the call fails like any other. Data files of artifacts are not guarded.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

enum { CACHE_LINE_BYTES = 64 };

/* The guarded addresses of the call in this thread, and the place to continue at after a SIGBUS in them. */
extern __thread const char *volatile guarded_begin, *volatile guarded_end;
extern __thread sigjmp_buf after_fault;

PyObject *add_rows(PyObject *module, PyObject *arguments);
PyObject *open_table(PyObject *module, PyObject *arguments);
PyObject *gather_rows(PyObject *module, PyObject *arguments);
PyObject *add_to_means(PyObject *module, PyObject *arguments);
PyObject *average_rows(PyObject *module, PyObject *arguments);

/* Read id `i`. Ids may be unaligned, because they are read in place from the request body. */
static inline int64_t id_at(const void *ids, Py_ssize_t i)
{
    int64_t id;
    memcpy(&id, (const char *)ids + 8 * i, 8);
    return id;
}
