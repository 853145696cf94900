/* Launches that read several tensors on a CUDA device: `Lane._read_waiting` with `BatchRead.read`, for tensors that have not
   changed, of sizes and dtypes that were read before. */

#pragma once

#include "waiting.h"

#define WORKS_BYTES 32
#define WORK_BYTES 56
#define PLACED_WORK_BYTES 64
#define PENDING_BYTES 16

/* See `kernels.cuda.gpu` and `frameworks.torch.cuda.lane`; `configure_device` sets them. */
static long long most_together, partial_bytes, result_bytes, probe_offset, most_finished;

/* One tensor of a launch. All objects are borrowed. */
typedef struct {
    PyObject *kind, *dtype, *together;
    long long number_there, elements, address, came, base, pieces, batches, longer;
} Work;

static int fill_work(Work *work, PyObject *kind, long long number_there, long long address, long long came, long long base)
{
    work->kind = kind;
    work->dtype = GET(TensorKind, kind, dtype);
    work->together = NULL;
    work->number_there = number_there;
    work->address = address;
    work->came = came;
    work->base = base;
    return get_count(GET(TensorKind, kind, elements), &work->elements);
}

/* Read a waiting tensor into a work, if it has not changed. */
static int find_work(const Waiting *waiting, Work *work)
{
    int has = fill_work(work, waiting->kind, waiting->number, waiting->address, waiting->came, waiting->base);
    return has ? -1 : has_stayed(waiting);
}

/* Find how a tensor is divided; see `BatchRead.shared_out`. */
static int find_share(Work *work)
{
    PyObject *share = PyDict_GetItemWithError(GET(BatchRead, work->together, _shares), GET(TensorKind, work->kind, elements));
    if (share == NULL || !PyTuple_Check(share) || PyTuple_GET_SIZE(share) != 3) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return get_count(PyTuple_GET_ITEM(share, 0), &work->pieces) || get_count(PyTuple_GET_ITEM(share, 1), &work->batches) ||
                   get_count(PyTuple_GET_ITEM(share, 2), &work->longer)
               ? -1
               : 1;
}

/* Find the launch of all works of one dtype, of which this is the first. */
static int find_launch(PyObject *lane, Work *first, const Work *end)
{
    int placed = 0;
    for (Work *work = first; work < end; work++) {
        placed |= work->dtype == first->dtype && work->base;
    }
    PyObject *key = PyTuple_Pack(2, first->dtype, placed ? Py_True : Py_False);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(GET(Lane, lane, _together), key);
    Py_XDECREF(key);
    if (found == NULL || !IS(BatchRead, found)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    for (Work *work = first; work < end; work++) {
        if (work->dtype == first->dtype) {
            work->together = found;
        }
    }
    return 1;
}

/* The works of one launch follow each other. Small pieces come last, so that the launch ends evenly, and otherwise the newest
   tensor first: it may still be cached. */
static int compare_works(const void *left, const void *right)
{
    const Work *a = left, *b = right;
    if (a->together != b->together) {
        return a->together < b->together ? -1 : 1;
    }
    if (a->batches != b->batches) {
        return a->batches > b->batches ? -1 : 1;
    }
    if (a->came != b->came) {
        return a->came > b->came ? -1 : 1;
    }
    return a->number_there > b->number_there ? -1 : 1;
}

/* Take the counters of a launch, as `PieceCounters.begin` does. */
static int begin_counting(PyObject *turns, long long *now, long long *next)
{
    if (IS(PieceCounters, turns) && GET(PieceCounters, turns, _sure) == Py_True) {
        put(&GET(PieceCounters, turns, _sure), Py_False); /* an interrupted launch may have begun */
        return get_count(GET(PieceCounters, turns, _now), now) || get_count(GET(PieceCounters, turns, _next), next) ? -1 : 0;
    }
    PyObject *counters = PyObject_CallMethodNoArgs(turns, s_begin);
    int failed = counters == NULL || !PyTuple_Check(counters) || PyTuple_GET_SIZE(counters) != 2 ||
                 get_count(PyTuple_GET_ITEM(counters, 0), now) || get_count(PyTuple_GET_ITEM(counters, 1), next);
    Py_XDECREF(counters);
    return failed ? -1 : 0;
}

static int end_counting(PyObject *turns)
{
    if (!IS(PieceCounters, turns)) {
        return effect(PyObject_CallMethodNoArgs(turns, s_end));
    }
    PyObject *now = GET(PieceCounters, turns, _now);
    GET(PieceCounters, turns, _now) = GET(PieceCounters, turns, _next);
    GET(PieceCounters, turns, _next) = now;
    put(&GET(PieceCounters, turns, _sure), Py_True);
    return 0;
}

/* `PreparedLaunch.packed`. */
typedef struct {
    uint64_t call, kernel, stream, parameters;
    uint32_t blocks, threads, shared;
} PackedLaunch;

typedef int (*LaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                            void **);

/* Launch a kernel, as `PreparedLaunch.__call__` does, without ctypes. */
static int run_launch(PyObject *launch)
{
    PyObject *packed = IS(PreparedLaunch, launch) ? GET(PreparedLaunch, launch, packed) : NULL;
    PackedLaunch given;
    const Py_ssize_t size = offsetof(PackedLaunch, shared) + sizeof given.shared;
    if (packed == NULL || !PyBytes_Check(packed) || PyBytes_GET_SIZE(packed) != size) {
        return effect(PyObject_CallNoArgs(launch));
    }
    memcpy(&given, PyBytes_AS_STRING(packed), (size_t)size);
    int code;
    Py_BEGIN_ALLOW_THREADS /* a full queue makes the driver wait */
    code = ((LaunchKernel)(uintptr_t)given.call)((void *)(uintptr_t)given.kernel, given.blocks, 1, 1, given.threads, 1, 1,
                                                 given.shared, (void *)(uintptr_t)given.stream,
                                                 (void **)(uintptr_t)given.parameters, NULL);
    Py_END_ALLOW_THREADS
    if (!code) {
        return 0;
    }
    PyObject *failure = PyLong_FromLong(code);
    int failed = failure == NULL || effect(PyObject_CallMethodOneArg(launch, s_check, failure));
    Py_XDECREF(failure);
    return failed ? -1 : 0;
}

/* Fill in the parameter of a launch, and note where its partial results will be. */
static int write_works(PyObject *lane, PyObject *batch, const Work *works, Py_ssize_t count, long long used, char *memory)
{
    PyObject *together = works->together, *pending = GET(Lane, lane, _pending);
    int placed = GET(BatchRead, together, _placed) == Py_True;
    long long partials, results, weights, now, next, pieces = 0;
    Py_ssize_t before = PyByteArray_GET_SIZE(pending);
    if (begin_counting(GET(BatchRead, together, _turns), &now, &next) ||
        get_count(GET(Lane, lane, _partials_at), &partials) || get_count(GET(Batch, batch, _address), &results) ||
        get_count(GET(BatchRead, together, _weights), &weights) ||
        PyByteArray_Resize(pending, before + count * (Py_ssize_t)PENDING_BYTES)) {
        return -1;
    }
    char *at = memory + WORKS_BYTES, *noted = PyByteArray_AS_STRING(pending) + before;
    for (const Work *work = works; work < works + count; work++) {
        uint64_t wide[5] = {work->address, partials + (used + pieces) * partial_bytes,
                            results + work->number_there * result_bytes + probe_offset, 0, work->elements};
        uint32_t narrow[6] = {work->pieces, work->batches, work->longer, pieces, work->base, 0};
        memcpy(at, wide, sizeof wide);
        memcpy(at + sizeof wide, narrow, placed ? 24 : 16);
        at += placed ? PLACED_WORK_BYTES : WORK_BYTES;
        uint32_t row[4] = {used + pieces, work->pieces, work->number_there, 0};
        memcpy(noted, row, PENDING_BYTES);
        noted += PENDING_BYTES;
        pieces += work->pieces;
    }
    uint64_t first = weights, counted[2] = {now, next};
    uint32_t counts[2] = {count, pieces};
    memcpy(memory, &first, 8);
    memcpy(memory + 8, counts, 8);
    memcpy(memory + 16, counted, 16);
    return put_count(&GET(Lane, lane, _used), used + pieces);
}

static int launch_works(PyObject *lane, PyObject *batch, const Work *works, Py_ssize_t count)
{
    PyObject *together = works->together;
    long long used, most, pieces = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        pieces += works[i].pieces;
    }
    if (get_count(GET(Lane, lane, _used), &used) || get_count(GET(Lane, lane, _most), &most)) {
        return -1;
    }
    if (used + pieces > most || PyByteArray_GET_SIZE(GET(Lane, lane, _pending)) / PENDING_BYTES + count > most_finished) {
        if (effect(PyObject_CallMethodOneArg(lane, s__finish, batch)) || get_count(GET(Lane, lane, _used), &used)) {
            return -1;
        }
    }
    Py_buffer memory;
    if (PyObject_GetBuffer(GET(BatchRead, together, _memory), &memory, PyBUF_WRITABLE)) {
        return -1;
    }
    Py_ssize_t each = GET(BatchRead, together, _placed) == Py_True ? PLACED_WORK_BYTES : WORK_BYTES;
    int failed = used + pieces > most || WORKS_BYTES + count * each > memory.len;
    if (failed) {
        PyErr_SetString(PyExc_AssertionError, "far fewer bytes than that wait at a time");
    }
    failed = failed || write_works(lane, batch, works, count, used, memory.buf) ||
             run_launch(GET(BatchRead, together, _launch)) || end_counting(GET(BatchRead, together, _turns));
    PyBuffer_Release(&memory);
    return failed ? -1 : 0;
}

/* Find the launches and the divisions of works. Whether all of them were made before. */
static int find_launches(PyObject *lane, Work *works, Py_ssize_t count)
{
    int is = 1;
    for (Py_ssize_t i = 0; is == 1 && i < count; i++) {
        is = works[i].together == NULL ? find_launch(lane, &works[i], works + count) : 1;
        is = is == 1 ? find_share(&works[i]) : is;
    }
    return is;
}

/* Take note of results that do not come, because a launch failed or was interrupted. The error that is set stays set. */
static void miss_results(PyObject *batch, const Work *works, Py_ssize_t count)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *number_there = PyLong_FromLongLong(works[i].number_there);
        if (number_there == NULL || PySet_Add(GET(Batch, batch, missed), number_there)) {
            PyErr_Clear();
        }
        Py_XDECREF(number_there);
    }
    PyErr_Restore(type, value, trace);
}

/* Read everything that waits, if nothing about it is unusual. */
static int launch_waiting(PyObject *lane)
{
    PyObject *batch = GET(Lane, lane, _batch), *store = GET(Lane, lane, _waiting);
    Work works[MOST_WAITING];
    Waiting taken[MOST_WAITING];
    if (core == NULL || !IS(Batch, batch) || Py_TYPE(store) != WaitingTensorsType) {
        return 0;
    }
    WaitingTensors *waiting = (WaitingTensors *)store;
    Py_ssize_t count = waiting->count, first = 0, next;
    int is = count <= most_together;
    for (Py_ssize_t i = 0; is == 1 && i < count; i++) {
        is = find_work(&waiting->tensors[i], &works[i]);
    }
    is = is == 1 ? find_launches(lane, works, count) : is;
    if (is < 1 || !count) {
        return is;
    }
    if (make_all_known(waiting)) {
        return -1;
    }
    qsort(works, count, sizeof *works, compare_works);
    take_waiting(waiting, taken);
    Py_INCREF(batch);
    for (int failed = 0; !failed && first < count; first = failed ? first : next) {
        for (next = first; next < count && works[next].together == works[first].together;) {
            next++;
        }
        failed = launch_works(lane, batch, works + first, next - first);
        if (failed) {
            is = -1;
        }
    }
    if (is < 0) {
        miss_results(batch, works + first, count - first);
    }
    Py_DECREF(batch);
    drop_all(taken, count);
    return is;
}

static PyObject *read_waiting(PyObject *module, PyObject *lane)
{
    int done = IS(Lane, lane) ? launch_waiting(lane) : 0;
    return done < 0 ? NULL : PyBool_FromLong(done);
}
