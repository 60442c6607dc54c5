/* The module of the kernels, and the handler of SIGBUS in mapped files. */
#include "_kernels.h"

__thread const char *volatile guarded_begin, *volatile guarded_end;
__thread sigjmp_buf after_fault;
static struct sigaction previous;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    (void)context;
    const char *address = info->si_addr;
    if (address >= guarded_begin && address < guarded_end)
        siglongjmp(after_fault, 1);
    sigaction(number, &previous, NULL); /* the same access faults again, now without this handler */
}

static PyObject *guard_files(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    struct sigaction current, ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, NULL, &current))
        return PyErr_SetFromErrno(PyExc_OSError);
    if (!(current.sa_flags & SA_SIGINFO) || current.sa_sigaction != on_bus_error) {
        previous = current;
        if (sigaction(SIGBUS, &ours, NULL))
            return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"add_rows", add_rows, METH_VARARGS, "add_rows(ids, table, scale, positions, out, width): write to out the rows of "
     "table at ids, times scale, plus positions"},
    {"open_table", open_table, METH_VARARGS, "open_table(parts, row_bytes): return a table for gather_rows, of the rows of "
     "all parts, buffers in a tuple"},
    {"gather_rows", gather_rows, METH_VARARGS, "gather_rows(ids, tables, out, heads): write to out the bytes of rows; each "
     "table has heads ids in turn"},
    {"add_to_means", add_to_means, METH_VARARGS, "add_to_means(vectors, lengths, place, total, means): add vectors to the sums "
     "of rows, and write to means each mean that is complete; place and total keep an incomplete row for the next call"},
    {"average_rows", average_rows, METH_VARARGS, "average_rows(ids, lengths, table, means): write to means the mean of the "
     "rows of table at the ids of each row; lengths are the numbers of its ids"},
    {"guard_files", guard_files, METH_NOARGS, "guard_files(): from now on, add_rows and gather_rows raise BufferError if the "
     "file of a mapped output or table becomes shorter"},
    {0},
};

static PyModuleDef_Slot slots[] = {{0}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "preblock.service.runtime._kernels", 0, 0, methods, slots, 0, 0, 0};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModuleDef_Init(&module);
}
