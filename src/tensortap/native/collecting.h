/* The columns of rows whose results have arrived: `CudaReader.collect` and `PendingRows._join` for rows without anything
   unusual.

   The thread that writes the index runs this, while another one trains. Each NumPy operation would release the interpreter
   and wait for it again, and so would the training. Here it is released once. */

#pragma once

#include "rows.h"

#include <math.h>

#define BUCKETS 256

/* `kernels.cuda.results.RESULT`. */
typedef struct {
    float sketch[BUCKETS];
    double about, sum, squares, l1, low, high;
    uint64_t digest, nan, posinf, neginf, zeros, edge;
    uint32_t probe, unchanged;
} Result;

enum { COUNTS = 7, MOMENTS = 6, MOST_BATCHES = 256 };

static double at_least_zero(double value)
{
    return value < 0 ? 0 : value; /* NaN stays */
}

/* Compute the statistics of a row, as `kernels.cuda.results.columns` does. */
static void fill_statistics(const Result *result, int64_t elements, double *moments, Py_ssize_t rows)
{
    int64_t finite = elements - (int64_t)(result->nan + result->posinf + result->neginf);
    int64_t ordinary = finite - (int64_t)result->edge;
    double low = result->low, high = result->high, count = (double)ordinary;
    double along = result->sum / count, mean = result->about + along;
    double m2 = at_least_zero(result->squares - result->sum * along);
    if (low == high && !result->edge) {
        mean = low;
        m2 = 0;
    }
    double std = sqrt(m2 / count), l2 = sqrt(m2 + count * (mean * mean));
    if (!finite) {
        low = high = Py_NAN;
    }
    if (!ordinary) {
        mean = std = Py_NAN;
        l2 = 0;
    }
    double found[MOMENTS] = {low, high, mean, std, result->l1, l2};
    for (int i = 0; i < MOMENTS; i++) {
        moments[i * rows] = found[i];
    }
}

/* The memory that `collect_results` reads and writes. */
typedef struct {
    const DeviceEntries *const *steps;
    const Result *const *batches; /* of all steps, one after the other */
    const Result **found;         /* that of each row */
    int64_t *counts;
    double *moments;
    float *sketches;
    char *unchanged;
    Py_ssize_t count, rows;
} Collection;

/* Whether a tensor is unchanged since its earlier sighting, as `TicketColumns.find_results` decides. */
static int is_same(const int64_t *ticket, const Result *own, const Result *earlier)
{
    return ticket[4] == SAME || (ticket[4] == PROBED && own->unchanged) || (ticket[4] == READ && own->digest == earlier->digest);
}

static void fill_row(const Collection *all, Py_ssize_t row, const int64_t *ticket, const Result *result)
{
    const uint64_t counts[COUNTS] = {(uint64_t)ticket[2], result->nan,   result->posinf, result->neginf,
                                     result->zeros,       result->edge, result->digest};
    for (int i = 0; i < COUNTS; i++) {
        all->counts[i * all->rows + row] = (int64_t)counts[i];
    }
    fill_statistics(result, ticket[2], all->moments + row, all->rows);
    memcpy(all->sketches + row * BUCKETS, result->sketch, sizeof result->sketch);
}

static void fill_columns(const Collection *all)
{
    Py_ssize_t row = 0, batch = 0;
    for (Py_ssize_t i = 0; i < all->count; i++) {
        const DeviceEntries *step = all->steps[i];
        const Result **found = all->found + row;
        for (Py_ssize_t here = 0; here < PyList_GET_SIZE(step->slots); here++, row++) {
            const int64_t *ticket = step->tickets + here * TICKET;
            const Result *own = all->batches[batch + ticket[0]] + ticket[1];
            const Result *earlier = ticket[4] == NEW ? own : found[ticket[3]];
            int same = is_same(ticket, own, earlier);
            found[here] = same ? earlier : own;
            fill_row(all, row, ticket, found[here]);
            all->unchanged[row] = (char)same;
        }
        batch += PyList_GET_SIZE(step->batches);
    }
}

/* Whether every result of a step is there, and earlier sightings are earlier rows. */
static int is_collectable(const DeviceEntries *step, const Py_buffer *buffers)
{
    for (Py_ssize_t row = 0; row < PyList_GET_SIZE(step->slots); row++) {
        const int64_t *ticket = step->tickets + row * TICKET;
        Py_ssize_t held = buffers[ticket[0]].len / (Py_ssize_t)sizeof(Result);
        if (ticket[1] >= held || (ticket[4] != NEW && (ticket[3] < 0 || ticket[3] >= row))) {
            return 0;
        }
    }
    return 1;
}

/* Take rows from a list (borrowed). Whether all of them are of this module. */
static int take_steps(PyObject *listed, const DeviceEntries **steps, Py_ssize_t *rows)
{
    Py_ssize_t count = PyList_GET_SIZE(listed);
    *rows = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *step = PyList_GET_ITEM(listed, i);
        if (Py_TYPE(step) != DeviceEntriesType) {
            return 0;
        }
        steps[i] = (const DeviceEntries *)step;
        *rows += PyList_GET_SIZE(steps[i]->slots);
    }
    return 1;
}

static int has_bytes(const Py_buffer *buffer, Py_ssize_t rows, size_t each)
{
    if (buffer->len == rows * (Py_ssize_t)each) {
        return 1;
    }
    PyErr_SetString(PyExc_ValueError, "the columns have another number of rows");
    return 0;
}

/* collect_results(steps, results, counts, moments, sketches, unchanged): fill in the columns of rows in several steps.
   `results` has an array for each batch of each step. Whether that was done. */
static PyObject *collect_results(PyObject *module, PyObject *args)
{
    PyObject *listed, *results;
    Py_buffer counts, moments, sketches, unchanged, buffers[MOST_BATCHES];
    const DeviceEntries *steps[MOST_BATCHES];
    const Result *batches[MOST_BATCHES];
    Py_ssize_t rows = 0, held = 0, first = 0;
    if (!PyArg_ParseTuple(args, "O!O!w*w*w*w*", &PyList_Type, &listed, &PyList_Type, &results, &counts, &moments, &sketches,
                          &unchanged)) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(listed), given = PyList_GET_SIZE(results);
    int is = count <= MOST_BATCHES && given <= MOST_BATCHES && take_steps(listed, steps, &rows);
    for (; is && held < given; held++) {
        if (PyObject_GetBuffer(PyList_GET_ITEM(results, held), &buffers[held], PyBUF_SIMPLE)) {
            is = -1;
            break;
        }
        batches[held] = buffers[held].buf;
    }
    for (Py_ssize_t i = 0; is == 1 && i < count; i++) {
        Py_ssize_t own = PyList_GET_SIZE(steps[i]->batches);
        is = first + own <= held && is_collectable(steps[i], buffers + first);
        first += own;
    }
    if (is == 1 && !(has_bytes(&counts, rows, COUNTS * sizeof(int64_t)) && has_bytes(&moments, rows, MOMENTS * sizeof(double)) &&
                     has_bytes(&sketches, rows, BUCKETS * sizeof(float)) && has_bytes(&unchanged, rows, 1))) {
        is = -1;
    }
    const Result **found = is == 1 ? PyMem_Malloc((size_t)(rows + 1) * sizeof *found) : NULL;
    if (is == 1 && found == NULL) {
        PyErr_NoMemory();
        is = -1;
    }
    if (is == 1) {
        Collection all = {steps, batches, found, counts.buf, moments.buf, sketches.buf, unchanged.buf, count, rows};
        Py_BEGIN_ALLOW_THREADS /* nothing is added to rows that are written */
        fill_columns(&all);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(found);
    while (held--) {
        PyBuffer_Release(&buffers[held]);
    }
    PyBuffer_Release(&counts);
    PyBuffer_Release(&moments);
    PyBuffer_Release(&sketches);
    PyBuffer_Release(&unchanged);
    return is < 0 ? NULL : PyBool_FromLong(is);
}

/* join_numbers(steps, unchanged, columns): fill in step, seq, row of the earlier sighting, placement and tensor of each row
   of several steps. Tensors are counted from 0, in the order in which they came. The number of tensors, or None. */
static PyObject *join_numbers(PyObject *module, PyObject *args)
{
    PyObject *listed;
    Py_buffer unchanged, columns;
    const DeviceEntries *steps[MOST_BATCHES];
    Py_ssize_t rows = 0, row = 0, start = 0;
    int64_t tensors = 0;
    if (!PyArg_ParseTuple(args, "O!y*w*", &PyList_Type, &listed, &unchanged, &columns)) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(listed);
    int is = count <= MOST_BATCHES && take_steps(listed, steps, &rows);
    if (is && !(has_bytes(&unchanged, rows, 1) && has_bytes(&columns, rows, (NUMBERS + 1) * sizeof(int64_t)))) {
        is = -1;
    }
    for (Py_ssize_t i = 0; is == 1 && i < count; i++, start = row) {
        for (Py_ssize_t here = 0; here < PyList_GET_SIZE(steps[i]->slots); here++, row++) {
            const int64_t *numbers = steps[i]->numbers + here * NUMBERS;
            int64_t *column = (int64_t *)columns.buf + row, before = numbers[2] < 0 ? NOWHERE : numbers[2] + start;
            int again = before >= 0 && before < row && ((const char *)unchanged.buf)[row];
            column[0] = numbers[0];
            column[rows] = numbers[1];
            column[2 * rows] = before;
            column[3 * rows] = numbers[3];
            column[4 * rows] = again ? ((const int64_t *)columns.buf)[4 * rows + before] : tensors++;
        }
    }
    PyBuffer_Release(&unchanged);
    PyBuffer_Release(&columns);
    if (is < 1) {
        return is < 0 ? NULL : Py_NewRef(Py_None);
    }
    return PyLong_FromLongLong(tensors);
}
