/* Reads of tensors on a CUDA device that may wait: `Recorder._record_later` with `CudaReader.deferrable` and
   `Lane.submit_deferred`, and reads at once of tensors that are often not in the graph, for tensors without anything
   unusual. What is kept of them is in objects that Python uses, too, so that each tensor may take the other way. */

#pragma once

#include "launches.h"

static long long too_large, most_results, most_pending;

static PyObject *configure_device(PyObject *module, PyObject *args)
{
    PyObject *classes, *found;
    if (!PyArg_ParseTuple(args, "OOLLLLLLLL", &classes, &core, &too_large, &most_together, &most_results, &partial_bytes,
                          &result_bytes, &probe_offset, &most_finished, &most_pending)) {
        return NULL;
    }
    Py_INCREF(core); /* held for ever */
    DEVICE_CLASSES(FIND_CLASS)
    DEVICE_FIELDS(FIND_FIELD)
    Py_RETURN_NONE;
}

static long long later(long long now, long long delay)
{
    return delay > LLONG_MAX - now ? LLONG_MAX : now + delay;
}

/* Whether a function of a module, called without arguments, returns this number. */
static int module_returns(PyObject *module, PyObject *name, PyObject *expected)
{
    PyObject *now = PyObject_CallMethodNoArgs(module, name);
    int same = now == NULL ? -1 : is_equal(now, expected);
    Py_XDECREF(now);
    return same;
}

/* The current stream when `TensorAccess` was asked last, by its id there and by its address. */
static struct {
    long long device, address;
    int64_t id;
} known_stream = {-1, 0, 0};

/* Whether `continues`, from what `TensorAccess` answers; -2 if that does not suffice. */
static int accessed_continues(PyObject *reader, PyObject *lane)
{
    long long phase, device, stream;
    int32_t current;
    int64_t id;
    if (get_count(GET(CudaReader, reader, _phase), &phase) || get_count(GET(Lane, lane, index), &device) ||
        get_count(GET(Lane, lane, _stream), &stream)) {
        return -1;
    }
    if (tensor_access->graph_task() != phase) {
        return 0;
    }
    if (!tensor_access->current_stream((int32_t)device, &current, &id)) {
        return -2;
    }
    if (current != device) {
        return 0;
    }
    if (known_stream.device != device || known_stream.id != id) {
        PyObject *now = PyObject_CallMethodOneArg(core, s__cuda_getCurrentRawStream, GET(Lane, lane, index));
        int failed = now == NULL || get_count(now, &known_stream.address);
        Py_XDECREF(now);
        known_stream.device = failed ? -1 : device;
        known_stream.id = id;
        if (failed) {
            return -1;
        }
    }
    return known_stream.address != stream ? 0 : stream ? -2 : 1; /* the default stream cannot be captured */
}

/* Whether the current device, stream and phase are those of the lane, and no graph is being captured. */
static int continues(PyObject *reader, PyObject *lane)
{
    PyObject *index = GET(Lane, lane, index);
    long long stream;
    int is;
    if (tensor_access != NULL && (is = accessed_continues(reader, lane)) != -2) {
        return is;
    }
    if ((is = module_returns(core, s__current_graph_task_id, GET(CudaReader, reader, _phase))) < 1 ||
        (is = module_returns(core, s__cuda_getDevice, index)) < 1) {
        return is;
    }
    PyObject *current = PyObject_CallMethodOneArg(core, s__cuda_getCurrentRawStream, index);
    is = current == NULL || get_count(current, &stream) ? -1 : is_equal(current, GET(Lane, lane, _stream));
    Py_XDECREF(current);
    if (is < 1 || !stream) { /* the default stream cannot be captured */
        return is;
    }
    is = method_flag(core, s__cuda_isCurrentStreamCapturing);
    return is < 0 ? -1 : !is;
}

/* Find where in a whole the tensors of a slot sit: None in a run of one process. Whether that is known; see
   `Placer.is_current`. */
static int placement_of(PyObject *recorder, PyObject *slot, PyObject *kind, PyObject *step, PyObject **place)
{
    PyObject *placer = GET(Recorder, recorder, placer), *found = GET(RecordSlot, slot, place);
    *place = Py_None;
    if (placer == Py_None) {
        return 1;
    }
    if (!IS(Placer, placer) || !IS(SlotPlacement, found) || GET(SlotPlacement, found, base) == Py_None) {
        return 0;
    }
    PyObject *batch = GET(Placer, placer, batch);
    int begun = PyTuple_Check(batch), is = is_equal(GET(RecordSlot, slot, kind), s_input);
    if (is < 0 || GET(SlotPlacement, found, batch) != (begun ? PyTuple_GET_ITEM(batch, 2) : Py_None)) {
        return is < 0 ? -1 : 0;
    }
    if (is && (!begun || (is = is_equal(PyTuple_GET_ITEM(batch, 0), step)) < 1 ||
               (is = is_equal(PyTuple_GET_ITEM(batch, 1), GET(RecordSlot, slot, micro))) < 1)) {
        return begun ? is : 0; /* it begins a forward */
    }
    *place = found;
    return is_equal(GET(SlotPlacement, found, shape), GET(TensorKind, kind, shape));
}

/* The tensor that is recorded now. All objects are borrowed; those that may change meanwhile are held by `take_later`. */
typedef struct {
    PyObject *recorder, *reader, *lane, *batch, *pending, *tensor, *slot, *kind, *step, *place;
    DeviceEntries *entries;
    WaitingTensors *waiting;
    KnownTensor token;
    long long nbytes;
    int state; /* whether it is a parameter or a buffer, which is read every time */
} Sighting;


/* --- rows ------------------------------------------------------------------------------------------------------------ */
/* Count a tensor, as `Lane.submit` does. */
static void count_tensor(const Sighting *seen)
{
    seen->waiting->came++;
    seen->waiting->seen += seen->nbytes;
}

/* Append the row of a tensor, as `Recorder._record_later` does. */
static int append_row(const Sighting *seen, PyObject *batch, long long number_there, int relation)
{
    PyObject *slot = seen->slot, **seq = &GET(Recorder, seen->recorder, _seq);
    long long step, number_here, elements;
    int gradient = is_equal(GET(RecordSlot, slot, kind), s_param_grad);
    if (gradient < 0 || get_count(seen->step, &step) || get_count(*seq, &number_here) ||
        get_count(GET(TensorKind, seen->kind, elements), &elements)) {
        return -1;
    }
    DeviceRow row = {slot, seen->kind, batch, number_there, elements, step, number_here, seen->token.row,
                     seen->token.placement, relation};
    if (append_device_row(seen->entries, &row) || put_count(seq, number_here + 1)) {
        return -1;
    }
    put(&GET(RecordSlot, slot, used), seen->step);
    if (!gradient || GET(Recorder, seen->recorder, compares_gradients) != Py_True) {
        return 0;
    }
    PyObject *at = Py_BuildValue("On", seen->pending, PyList_GET_SIZE(seen->entries->slots) - 1);
    int failed = at == NULL || effect(PyObject_CallMethodObjArgs(seen->recorder, s__note_gradient, slot, at, NULL));
    Py_XDECREF(at);
    return failed ? -1 : 0;
}

/* The number of the next result. */
static int next_result(PyObject *batch, long long *number_there)
{
    return get_count(GET(Batch, batch, size), number_there) ||
                   put_count(&GET(Batch, batch, size), *number_there + 1)
               ? -1
               : 0;
}

static long long base_of(const Sighting *seen)
{
    long long base = 0;
    if (seen->place != Py_None && get_count(GET(SlotPlacement, seen->place, base), &base)) {
        PyErr_Clear(); /* `placement_of` has looked at it */
    }
    return base;
}


/* --- reading --------------------------------------------------------------------------------------------------------- */
/* Read everything that waits. */
static int read_all(PyObject *lane)
{
    int done = launch_waiting(lane);
    return done ? (done < 0 ? -1 : 0) : effect(PyObject_CallMethodNoArgs(lane, s__read_waiting));
}

/* Read what must not wait any longer, as `Lane.submit` does. */
static int read_due(const Sighting *seen)
{
    const WaitingTensors *waiting = seen->waiting;
    if (waiting->count == most_together && read_all(seen->lane)) {
        return -1;
    }
    int is_due = waiting->came >= waiting->last || waiting->seen >= waiting->due;
    return is_due ? effect(PyObject_CallMethodNoArgs(seen->lane, s__read_due)) : 0;
}

/* Record a tensor that the step has shown before. It has the result of that sighting, unless that was missed: whether it
   was not. */
static int record_known(const Sighting *seen)
{
    const int64_t *ticket = seen->entries->tickets + seen->token.row * TICKET;
    PyObject *batch = PyList_GET_ITEM(seen->entries->batches, ticket[0]), *missed = GET(Batch, batch, missed);
    long long number_there = ticket[1];
    if (PySet_GET_SIZE(missed)) {
        PyObject *key = PyLong_FromLongLong(number_there);
        int gone = key == NULL ? -1 : PySet_Contains(missed, key);
        Py_XDECREF(key);
        if (gone) {
            return gone < 0 ? -1 : 0;
        }
    }
    count_tensor(seen);
    return append_row(seen, batch, number_there, SAME) || read_due(seen) ? -1 : 1;
}

/* Let a tensor wait, as `Lane._defer` does, and record it. */
static int record_later(const Sighting *seen, PyObject *bound)
{
    long long delay = LLONG_MAX, number_there;
    WaitingTensors *waiting = seen->waiting;
    if (!seen->state && get_count(GET(ReadSlot, bound, safe_delay), &delay)) {
        return -1;
    }
    count_tensor(seen);
    Waiting *one = next_waiting(waiting, seen->token.address);
    if (one == NULL) {
        return -1;
    }
    if (keep_memory(one, seen->tensor, seen->token.version) || next_result(seen->batch, &number_there)) {
        drop_waiting(one);
        waiting->count--;
        return -1;
    }
    put(&one->kind, seen->kind);
    put(&one->bound, bound);
    if (!seen->state) {
        put((PyObject **)&one->entries, (PyObject *)seen->entries);
        one->token = seen->token;
        one->token.row = PyList_GET_SIZE(seen->entries->slots);
    }
    one->number = number_there;
    one->came = waiting->came;
    one->last = later(waiting->came, delay);
    one->due = later(waiting->seen, waiting->most);
    one->base = base_of(seen);
    if (!seen->state && seen->entries->waiting != seen->waiting) {
        if (seen->entries->waiting != NULL && make_all_known(seen->entries->waiting)) {
            return -1;
        }
        put((PyObject **)&seen->entries->waiting, (PyObject *)seen->waiting);
    }
    waiting->last = one->last < waiting->last ? one->last : waiting->last;
    return append_row(seen, seen->batch, number_there, NEW) || read_due(seen) ? -1 : 1;
}

/* Read a tensor at once, and record it, if tensors like it were read before. */
static int record_now(Sighting *seen)
{
    Work work;
    long long size;
    if (get_count(GET(Batch, seen->batch, size), &size) ||
        fill_work(&work, seen->kind, size, seen->token.address, 0, base_of(seen))) {
        return -1;
    }
    int is = find_launches(seen->lane, &work, 1);
    if (is < 1) {
        return is;
    }
    if (storage_of(seen->tensor, &seen->token.storage) || next_result(seen->batch, &size)) {
        return -1;
    }
    count_tensor(seen);
    if (launch_works(seen->lane, seen->batch, &work, 1)) {
        miss_results(seen->batch, &work, 1);
        return -1;
    }
    if (append_row(seen, seen->batch, size, NEW)) {
        return -1;
    }
    seen->token.row = PyList_GET_SIZE(seen->entries->slots) - 1;
    return remember_tensor(seen->entries, &seen->token, seen->tensor) || read_due(seen) ? -1 : 1;
}


/* --- deciding -------------------------------------------------------------------------------------------------------- */
/* Whether a read of this slot is known to be deferred in this step; see `ReadOrder.when`. */
static int may_wait(PyObject *recorder, PyObject *slot, PyObject *step)
{
    PyObject *order = GET(Recorder, recorder, read_order), *read = GET(RecordSlot, slot, read);
    long long now, until;
    if (!IS(ReadOrder, order) || !IS(ReadSlot, read) || GET(ReadSlot, read, changed) != Py_False) {
        return 0;
    }
    int is = is_equal(GET(ReadOrder, order, _step), step);
    if (is < 1) {
        return is;
    }
    if (get_count(GET(ReadOrder, order, _recorded), &now) || get_count(GET(ReadSlot, read, later_until), &until)) {
        return -1;
    }
    return now < until;
}

/* Find where the rows and the tensors that wait are. Whether there is room for one more. */
static int find_room(Sighting *seen)
{
    PyObject *pending = GET(Recorder, seen->recorder, _pending), *lane = GET(CudaReader, seen->reader, _lane);
    if (!IS(PendingRows, pending) || GET(PendingRows, pending, device_reader) != seen->reader || !IS(Lane, lane)) {
        return 0;
    }
    PyObject *entries = GET(PendingRows, pending, entries), *waiting = GET(Lane, lane, _waiting);
    PyObject *batch = GET(Lane, lane, _batch);
    long long size;
    if (Py_TYPE(entries) != DeviceEntriesType || Py_TYPE(waiting) != WaitingTensorsType || !IS(Batch, batch)) {
        return 0;
    }
    seen->lane = lane;
    seen->batch = batch;
    seen->pending = pending;
    seen->entries = (DeviceEntries *)entries;
    seen->waiting = (WaitingTensors *)waiting;
    if (get_count(GET(Batch, batch, size), &size)) {
        return -1;
    }
    return size < most_results && PyList_GET_SIZE(seen->entries->slots) < most_pending && !seen->entries->released;
}

/* Whether the tensor lies as it is read, and which one it is. */
static int identify(Sighting *seen)
{
    long long device, address, version, placement = NOWHERE;
    if (seen->place != Py_None && GET(SlotPlacement, seen->place, number) != Py_None &&
        get_count(GET(SlotPlacement, seen->place, number), &placement)) {
        return -1;
    }
    int is = get_count(GET(Lane, seen->lane, index), &device) ? -1 : lies_as(seen->tensor, seen->kind, device, &address);
    if (is == 1 && address % 16) {
        return 0;
    }
    if (is < 0 || (is && version_of(seen->tensor, &version))) {
        if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            PyErr_Clear(); /* it has no version, no shape, or no own memory: the careful way knows what to do */
            return 0;
        }
        return -1;
    }
    if (is) {
        seen->token = (KnownTensor){(int64_t)(intptr_t)seen->kind, version, address, placement, 0, NOWHERE};
        is = !seen->state && find_row(seen->entries, seen->waiting, seen->tensor, &seen->token) ? -1 : 1;
    }
    return is;
}

/* Record a tensor whose read may wait, or is known to be needed now; see `Recorder._decide`. */
static int record_sighting(Sighting *seen, int forward)
{
    int is = identify(seen);
    if (is < 1) {
        return is;
    }
    if (seen->state) { /* nothing else runs meanwhile */
        PyObject *order = GET(Recorder, seen->recorder, read_order);
        return IS(ReadOrder, order) ? record_later(seen, GET(ReadOrder, order, snapshot)) : 0;
    }
    /* A tensor without gradient may belong to other code, and waits only where it was seen before. */
    if (forward && seen->token.row < 0 && GET(RecordSlot, seen->slot, in_graph) != Py_True) {
        if ((is = requires_gradient(seen->tensor)) < 1) {
            return is < 0 ? -1 : record_now(seen);
        }
    }
    if ((is = may_wait(seen->recorder, seen->slot, seen->step)) < 1) {
        return is;
    }
    return seen->token.row < 0 ? record_later(seen, GET(RecordSlot, seen->slot, read)) : record_known(seen);
}

/* Record a tensor on a device, as `Recorder.take` does, if there is nothing unusual about it. */
static int take_later(PyObject *recorder, PyObject *readers, PyObject *tensor, PyObject *slot, PyObject *step)
{
    if (core == NULL || PyList_GET_SIZE(readers) != 1 || !IS(RecordSlot, slot)) {
        return 0;
    }
    PyObject *reader = PyList_GET_ITEM(readers, 0), *kind = GET(RecordSlot, slot, likely);
    if (!PyObject_TypeCheck(reader, CudaReader) || !IS(TensorKind, kind) ||
        GET(CudaReader, reader, _one_stream) != Py_True || GET(Recorder, recorder, _gather) != Py_True) {
        return 0;
    }
    Sighting seen = {.recorder = recorder, .reader = reader, .tensor = tensor, .slot = slot, .kind = kind, .step = step};
    int is = find_room(&seen), forward, used;
    if (is < 1 || (is = is_equal(GET(RecordSlot, slot, keep), s_summary)) < 1) {
        return is;
    }
    PyObject *phase = GET(RecordSlot, slot, phase);
    if (GET(Recorder, recorder, _in_snapshot) == Py_True && (seen.state = is_equal(phase, s_state)) < 0) {
        return -1;
    }
    forward = is_equal(phase, s_forward);
    if (forward < 0 || (!forward && !seen.state && (is = is_equal(phase, s_backward)) < 1)) {
        return forward < 0 ? -1 : is;
    }
    if ((used = is_equal(GET(RecordSlot, slot, used), step)) || get_count(GET(TensorKind, kind, nbytes), &seen.nbytes)) {
        return used == 1 ? 0 : -1;
    }
    if (seen.nbytes >= too_large || (is = placement_of(recorder, slot, kind, step, &seen.place)) < 1 ||
        (is = continues(reader, seen.lane)) < 1) {
        return seen.nbytes >= too_large ? 0 : is;
    }
    PyObject *held[] = {reader, seen.lane, seen.batch, seen.pending, kind, seen.place, (PyObject *)seen.entries,
                        (PyObject *)seen.waiting};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
        Py_INCREF(held[i]);
    }
    is = record_sighting(&seen, forward);
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
        Py_DECREF(held[i]);
    }
    return is;
}
