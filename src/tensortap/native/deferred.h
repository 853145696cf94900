/* Reads of tensors on a CUDA device that may wait: `DeferredReads.add` of `frameworks.torch.cuda`, and the loop of
   `CudaReader._run_deferred` with `Recorder._read_deferred` and `Lane.submit_deferred`, for tensors without anything
   unusual. All state is in the Python objects, so that each tensor may take the other way. */

#pragma once

#include "launches.h"
#include "views.h"

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

/* Hide an object from the garbage collector. There are several for each tensor, which live until the step ends and are in
   no cycle: the collector would visit all of them several times. */
static void untrack(PyObject *object)
{
    if (object != NULL) {
        PyObject_GC_UnTrack(object);
    }
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

/* Whether the current device, stream and phase are those of the deferred reads, and no graph is being captured. */
static int continues(PyObject *reader, PyObject *deferred)
{
    int is = method_flag(core, s__cuda_isCurrentStreamCapturing);
    if (is) {
        return is < 0 ? -1 : 0;
    }
    PyObject *index = GET(DeferredReads, deferred, index);
    if ((is = module_returns(core, s__current_graph_task_id, GET(CudaReader, reader, _phase))) < 1 ||
        (is = module_returns(core, s__cuda_getDevice, index)) < 1) {
        return is;
    }
    PyObject *stream = PyObject_CallMethodOneArg(core, s__cuda_getCurrentRawStream, index);
    is = stream == NULL ? -1 : is_equal(stream, GET(DeferredReads, deferred, stream));
    Py_XDECREF(stream);
    return is;
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

/* The identity token, as `CudaReader.describe` returns it, with the number of its placement, and the storage: new
   references. */
static PyObject *token_of(PyObject *tensor, PyObject *kind, PyObject *version, PyObject *place, PyObject **storage)
{
    PyObject *shape = GET(TensorKind, kind, shape), *token = NULL, *at = NULL, *offset = NULL;
    if ((*storage = PyObject_CallMethodNoArgs(tensor, s_untyped_storage)) == NULL ||
        (at = PyObject_GetAttr(*storage, s__cdata)) == NULL ||
        (offset = PyObject_CallMethodNoArgs(tensor, s_storage_offset)) == NULL ||
        (token = PyTuple_New(4 + PyTuple_GET_SIZE(shape))) == NULL) {
        Py_XDECREF(at);
        Py_XDECREF(offset);
        Py_CLEAR(*storage);
        return NULL;
    }
    PyObject *dtype = GET(TensorKind, kind, dtype);
    Py_INCREF(dtype);
    Py_INCREF(version);
    PyTuple_SET_ITEM(token, 0, dtype);
    PyTuple_SET_ITEM(token, 1, version);
    PyTuple_SET_ITEM(token, 2, at);
    PyTuple_SET_ITEM(token, 3, offset);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++) {
        PyObject *size = PyTuple_GET_ITEM(shape, i);
        Py_INCREF(size);
        PyTuple_SET_ITEM(token, 4 + i, size);
    }
    untrack(token);
    if (place == Py_None || GET(SlotPlacement, place, number) == Py_None) {
        return token;
    }
    PyObject *placed = PyTuple_Pack(2, GET(SlotPlacement, place, number), token);
    Py_DECREF(token);
    untrack(placed);
    if (placed == NULL) {
        Py_CLEAR(*storage);
    }
    return placed;
}

/* Whether the step has shown this tensor before. */
static int is_known(PyObject *recorder, PyObject *reader, PyObject *tensor, PyObject *kind, PyObject *version,
                    PyObject *place)
{
    PyObject *pending = GET(Recorder, recorder, _pending), *storage;
    if (!IS(PendingRows, pending) || GET(PendingRows, pending, device_reader) != reader) {
        return 0;
    }
    PyObject *token = token_of(tensor, kind, version, place, &storage);
    int known = token == NULL ? -1 : PyDict_Contains(GET(PendingRows, pending, known), token);
    Py_XDECREF(token);
    Py_XDECREF(storage);
    return known;
}


/* --- deferring ------------------------------------------------------------------------------------------------------- */
/* Append a read, as `DeferredReads.add` does, and run all of them if they are due. */
static int add_read(PyObject *reader, PyObject *deferred, PyObject *tensor, PyObject *version, long long address,
                    PyObject *slot, PyObject *step, PyObject *place)
{
    PyObject *seen = GET(DeferredReads, deferred, _seen), *lane = GET(DeferredReads, deferred, lane);
    PyObject *read = GET(RecordSlot, slot, read), *kind = GET(RecordSlot, slot, likely);
    long long count = PyList_GET_SIZE(seen) + 1, most, delay, nbytes, waiting, came, came_limit, total, total_limit;
    if (get_count(GET(DeferredReads, deferred, _most), &most) || get_count(GET(ReadSlot, read, safe_delay), &delay) ||
        get_count(GET(DeferredReads, deferred, _bytes), &waiting) ||
        get_count(GET(TensorKind, kind, nbytes), &nbytes) || get_count(GET(Lane, lane, _came), &came) ||
        get_count(GET(Lane, lane, _last), &came_limit) || get_count(GET(Lane, lane, _seen), &total) ||
        get_count(GET(Lane, lane, _due), &total_limit)) {
        return -1;
    }
    PyObject *alias = PyObject_CallMethodNoArgs(tensor, s_detach), *entry = NULL;
    PyObject *at = alias == NULL ? NULL : PyLong_FromLongLong(address);
    if (at != NULL) {
        entry = PyTuple_Pack(8, alias, version, at, kind, read, slot, step, place);
        untrack(entry);
    }
    int failed = entry == NULL || PyList_Append(seen, entry);
    Py_XDECREF(alias);
    Py_XDECREF(at);
    Py_XDECREF(entry);
    waiting += nbytes;
    if (failed || put_count(&GET(DeferredReads, deferred, _bytes), waiting)) {
        return -1;
    }
    if (later(count, delay) < most) {
        most = later(count, delay);
        if (put_count(&GET(DeferredReads, deferred, _most), most)) {
            return -1;
        }
    }
    int due = count >= most || count == most_together;
    if (!due && (came + count >= came_limit || total + waiting >= total_limit)) {
        PyObject *found = PyObject_CallMethod(lane, "is_due", "LL", count, waiting);
        due = found == NULL ? -1 : PyObject_IsTrue(found);
        Py_XDECREF(found);
    }
    if (due < 0) {
        return -1;
    }
    put(&GET(DeferredReads, deferred, is_due), due ? Py_True : Py_False);
    return due ? effect(PyObject_CallMethodNoArgs(reader, s__run_deferred)) : 0;
}

/* Whether the tensor is on the device with this index, of the kind of the one before in its slot, and lies as it is read. */
static int is_readable(PyObject *tensor, PyObject *index, PyObject *kind, long long *address)
{
    long long device;
    int is = get_count(index, &device) ? -1 : lies_as(tensor, kind, device, address);
    return is == 1 ? *address % 16 == 0 : is;
}

/* Whether a read of this slot is known to be deferred in this step; see `Recorder._decide` and `ReadOrder.when`. */
static int may_wait(PyObject *recorder, PyObject *slot, PyObject *step, int *forward)
{
    PyObject *order = GET(Recorder, recorder, read_order), *read = GET(RecordSlot, slot, read);
    PyObject *phase = GET(RecordSlot, slot, phase);
    int is;
    if (GET(Recorder, recorder, _gather) != Py_True || !IS(ReadOrder, order) || !IS(ReadSlot, read) ||
        GET(ReadSlot, read, changed) != Py_False) {
        return 0;
    }
    if ((is = is_equal(GET(RecordSlot, slot, keep), s_summary)) < 1 ||
        (is = is_equal(GET(ReadOrder, order, _step), step)) < 1) {
        return is;
    }
    *forward = is_equal(phase, s_forward);
    if (*forward < 1 && (*forward < 0 || (is = is_equal(phase, s_backward)) < 1)) {
        return *forward < 0 ? -1 : is;
    }
    long long now, until;
    if (get_count(GET(ReadOrder, order, _recorded), &now) || get_count(GET(ReadSlot, read, later_until), &until)) {
        return -1;
    }
    return now < until;
}

/* Defer the read of a tensor on a device, as `Recorder.take` does. */
static int take_later(PyObject *recorder, PyObject *readers, PyObject *tensor, PyObject *slot, PyObject *step)
{
    if (core == NULL || PyList_GET_SIZE(readers) != 1 || !IS(RecordSlot, slot)) {
        return 0;
    }
    PyObject *reader = PyList_GET_ITEM(readers, 0), *kind = GET(RecordSlot, slot, likely), *version, *place;
    if (!PyObject_TypeCheck(reader, CudaReader) || !IS(TensorKind, kind)) {
        return 0;
    }
    PyObject *deferred = GET(CudaReader, reader, _deferred);
    if (!IS(DeferredReads, deferred) || GET(CudaReader, reader, _one_stream) != Py_True) {
        return 0;
    }
    long long address, nbytes;
    int forward, is = may_wait(recorder, slot, step, &forward);
    if (is < 1 || (is = placement_of(recorder, slot, kind, step, &place)) < 1) {
        return is;
    }
    if (get_count(GET(TensorKind, kind, nbytes), &nbytes)) {
        return -1;
    }
    if (nbytes >= too_large || (is = continues(reader, deferred)) < 1) {
        return nbytes >= too_large ? 0 : is;
    }
    Py_INCREF(kind);
    Py_INCREF(deferred);
    Py_INCREF(place);
    is = is_readable(tensor, GET(DeferredReads, deferred, index), kind, &address);
    version = is == 1 ? PyObject_GetAttr(tensor, s__version) : NULL;
    if (is < 0 || (is && version == NULL)) {
        is = -1;
        if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            PyErr_Clear(); /* it has no version, no shape, or no own memory: the careful way knows what to do */
            is = 0;
        }
    }
    /* A tensor without gradient may belong to other code, and waits only where it was seen before. */
    if (is == 1 && forward && GET(RecordSlot, slot, in_graph) != Py_True &&
        (is = flag(tensor, s_requires_grad)) == 0) {
        is = is_known(recorder, reader, tensor, kind, version, place);
    }
    if (is == 1 && add_read(reader, deferred, tensor, version, address, slot, step, place)) {
        is = -1;
    }
    Py_XDECREF(version);
    Py_DECREF(kind);
    Py_DECREF(deferred);
    Py_DECREF(place);
    return is;
}


/* --- reading --------------------------------------------------------------------------------------------------------- */
static PyObject *new_ticket(PyObject *batch, PyObject *number_there, PyObject *elements, PyObject *known)
{
    PyObject *ticket = CudaTicket->tp_alloc(CudaTicket, 0);
    if (ticket != NULL) {
        put(&GET(CudaTicket, ticket, batch), batch);
        put(&GET(CudaTicket, ticket, number), number_there);
        put(&GET(CudaTicket, ticket, elements), elements);
        put(&GET(CudaTicket, ticket, known), known);
        untrack(ticket);
    }
    return ticket;
}

/* Let a tensor wait for its launch, as `Lane._defer` does. `came` and `seen` are the lane's, this one included. */
static int wait_for_launch(PyObject *lane, PyObject *number_there, PyObject *entry, long long came, long long seen)
{
    PyObject *kind = PyTuple_GET_ITEM(entry, 3), *bound = PyTuple_GET_ITEM(entry, 4), *place = PyTuple_GET_ITEM(entry, 7);
    long long delay, last, most;
    if (get_count(GET(ReadSlot, bound, safe_delay), &delay) || get_count(GET(Lane, lane, _last), &last) ||
        get_count(GET(Lane, lane, _most_waiting), &most)) {
        return -1;
    }
    PyObject *waiting = WaitingTensor->tp_alloc(WaitingTensor, 0);
    if (waiting == NULL) {
        return -1;
    }
    untrack(waiting);
    put(&GET(WaitingTensor, waiting, tensor), PyTuple_GET_ITEM(entry, 0));
    put(&GET(WaitingTensor, waiting, elements), GET(TensorKind, kind, elements));
    put(&GET(WaitingTensor, waiting, address), PyTuple_GET_ITEM(entry, 2));
    put(&GET(WaitingTensor, waiting, version), PyTuple_GET_ITEM(entry, 1));
    put(&GET(WaitingTensor, waiting, bound), bound);
    if (place != Py_None) {
        put(&GET(WaitingTensor, waiting, base), GET(SlotPlacement, place, base));
    }
    int failed = (place == Py_None && put_count(&GET(WaitingTensor, waiting, base), 0)) ||
                 put_count(&GET(WaitingTensor, waiting, came), came) ||
                 put_count(&GET(WaitingTensor, waiting, last), later(came, delay)) ||
                 put_count(&GET(WaitingTensor, waiting, due), later(seen, most)) ||
                 PyDict_SetItem(GET(Lane, lane, _waiting), number_there, waiting) ||
                 (later(came, delay) < last && put_count(&GET(Lane, lane, _last), later(came, delay)));
    Py_DECREF(waiting);
    return failed ? -1 : 0;
}

/* Read everything that waits. */
static int read_all(PyObject *lane)
{
    int done = launch_waiting(lane);
    return done ? (done < 0 ? -1 : 0) : effect(PyObject_CallMethodNoArgs(lane, s__read_waiting));
}

/* Return the ticket of a tensor, as `Lane.submit_deferred` does. `known` is the ticket of an earlier sighting or NULL. */
static PyObject *submit(PyObject *lane, PyObject *batch, PyObject *entry, PyObject *known)
{
    PyObject *kind = PyTuple_GET_ITEM(entry, 3), *elements = GET(TensorKind, kind, elements), *ticket;
    long long came, seen, nbytes, last, due;
    if (get_count(GET(Lane, lane, _came), &came) || get_count(GET(Lane, lane, _seen), &seen) ||
        get_count(GET(TensorKind, kind, nbytes), &nbytes)) {
        return NULL;
    }
    came++;
    seen += nbytes;
    if (put_count(&GET(Lane, lane, _came), came) || put_count(&GET(Lane, lane, _seen), seen)) {
        return NULL;
    }
    if (known != NULL) {
        PyObject *number_there = GET(CudaTicket, known, number), *of = GET(CudaTicket, known, batch);
        int missed = PySet_Contains(GET(Batch, of, missed), number_there);
        if (missed < 0) {
            return NULL;
        }
        known = missed ? NULL : known;
    }
    if (known != NULL) {
        ticket = new_ticket(GET(CudaTicket, known, batch), GET(CudaTicket, known, number), elements, known);
    }
    else {
        PyObject *number_there = GET(Batch, batch, size);
        long long size;
        Py_INCREF(number_there);
        ticket = new_ticket(batch, number_there, elements, Py_None);
        if (ticket != NULL && (get_count(number_there, &size) || wait_for_launch(lane, number_there, entry, came, seen) ||
                               put_count(&GET(Batch, batch, size), size + 1) ||
                               (PyDict_GET_SIZE(GET(Lane, lane, _waiting)) == most_together && read_all(lane)))) {
            Py_CLEAR(ticket);
        }
        Py_DECREF(number_there);
    }
    if (ticket != NULL && (get_count(GET(Lane, lane, _last), &last) || get_count(GET(Lane, lane, _due), &due) ||
                           ((came >= last || seen >= due) && effect(PyObject_CallMethodNoArgs(lane, s__read_due))))) {
        Py_CLEAR(ticket);
    }
    return ticket;
}

/* Append the row of a tensor, as `PendingRows.append` does. */
static int append_row(PyObject *recorder, PyObject *pending, PyObject *entry, PyObject *ticket, PyObject *before)
{
    PyObject *kind = PyTuple_GET_ITEM(entry, 3), *slot = PyTuple_GET_ITEM(entry, 5), *step = PyTuple_GET_ITEM(entry, 6);
    PyObject *place = PyTuple_GET_ITEM(entry, 7), **seq = &GET(Recorder, recorder, _seq);
    PyObject *placement = place == Py_None ? Py_None : GET(SlotPlacement, place, number);
    long long number_here;
    put(&GET(RecordSlot, slot, used), step);
    if (PyList_Append(GET(PendingRows, pending, _slots), slot) ||
        PyList_Append(GET(PendingRows, pending, _steps), step) ||
        PyList_Append(GET(PendingRows, pending, _seqs), *seq) ||
        PyList_Append(GET(PendingRows, pending, _dtypes), GET(TensorKind, kind, name)) ||
        PyList_Append(GET(PendingRows, pending, _shapes), GET(TensorKind, kind, shape)) ||
        PyList_Append(GET(PendingRows, pending, tickets), ticket) ||
        PyList_Append(GET(PendingRows, pending, _before), before) ||
        PyList_Append(GET(PendingRows, pending, _placements), placement)) {
        return -1;
    }
    return get_count(*seq, &number_here) || put_count(seq, number_here + 1) ? -1 : 0;
}

/* Let later sightings of a tensor refer to the newest row, as `PendingRows.remember` does. */
static int remember(PyObject *pending, PyObject *token, PyObject *row, PyObject *storage)
{
    PyObject *references = PyObject_GetAttr(GET(PendingRows, pending, _held), s__references);
    PyObject *reference = references == NULL ? NULL : PyObject_CallMethodNoArgs(storage, s__weak_ref);
    int failed = reference == NULL || PyList_Append(references, reference) ||
                 PyDict_SetItem(GET(PendingRows, pending, known), token, row);
    Py_XDECREF(references);
    Py_XDECREF(reference);
    return failed ? -1 : 0;
}

static int read_known_or_new(PyObject *recorder, PyObject *lane, PyObject *pending, PyObject *entry)
{
    PyObject *batch = GET(Lane, lane, _batch), *slot = PyTuple_GET_ITEM(entry, 5), *storage = NULL, *ticket = NULL;
    PyObject *token = token_of(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 3), PyTuple_GET_ITEM(entry, 1),
                               PyTuple_GET_ITEM(entry, 7), &storage);
    PyObject *before = token == NULL ? NULL : PyDict_GetItemWithError(GET(PendingRows, pending, known), token);
    PyObject *row = NULL, *known = NULL;
    int result = -1, gradient;
    Py_INCREF(batch);
    if (token == NULL || (before == NULL && PyErr_Occurred())) {
        goto done;
    }
    if (before == NULL) {
        before = Py_None;
    }
    Py_INCREF(before);
    if (before != Py_None) {
        known = PyList_GET_ITEM(GET(PendingRows, pending, tickets), PyLong_AsSsize_t(before));
        if (!IS(CudaTicket, known)) {
            result = 0;
            goto forget;
        }
    }
    row = PyLong_FromSsize_t(PyList_GET_SIZE(GET(PendingRows, pending, tickets)));
    if (row == NULL || (ticket = submit(lane, batch, entry, known)) == NULL ||
        append_row(recorder, pending, entry, ticket, before) ||
        (gradient = is_equal(GET(RecordSlot, slot, kind), s_param_grad)) < 0) {
        goto forget;
    }
    if (gradient && GET(Recorder, recorder, compares_gradients) == Py_True) {
        PyObject *place = PyTuple_Pack(2, pending, row);
        int failed = place == NULL || effect(PyObject_CallMethodObjArgs(recorder, s__note_gradient, slot, place, NULL));
        Py_XDECREF(place);
        if (failed) {
            goto forget;
        }
    }
    result = before == Py_None && remember(pending, token, row, storage) ? -1 : 1;
forget:
    Py_DECREF(before);
done:
    Py_DECREF(batch);
    Py_XDECREF(token);
    Py_XDECREF(storage);
    Py_XDECREF(row);
    Py_XDECREF(ticket);
    return result;
}

/* Read one deferred tensor, if there is nothing unusual about it. */
static int read_one(PyObject *recorder, PyObject *reader, PyObject *lane, PyObject *entry)
{
    PyObject *pending = GET(Recorder, recorder, _pending), *tensor = PyTuple_GET_ITEM(entry, 0);
    PyObject *slot = PyTuple_GET_ITEM(entry, 5), *batch = GET(Lane, lane, _batch);
    long long address, expected, size;
    if (!IS(PendingRows, pending) || GET(PendingRows, pending, device_reader) != reader ||
        PyList_GET_SIZE(GET(PendingRows, pending, tickets)) == most_pending || !IS(Batch, batch) ||
        !IS(TensorKind, PyTuple_GET_ITEM(entry, 3)) || !IS(ReadSlot, PyTuple_GET_ITEM(entry, 4)) ||
        !IS(RecordSlot, slot)) {
        return 0;
    }
    int is = is_equal(GET(RecordSlot, slot, used), PyTuple_GET_ITEM(entry, 6));
    if (is) {
        return is < 0 ? -1 : 0;
    }
    if (get_count(GET(Batch, batch, size), &size) || get_count(PyTuple_GET_ITEM(entry, 2), &expected)) {
        return -1;
    }
    if (size == most_results) {
        return 0;
    }
    if ((is = has(tensor, s__version, PyTuple_GET_ITEM(entry, 1))) < 1) {
        return is;
    }
    if (address_of(tensor, &address)) {
        return -1;
    }
    if (address != expected) {
        return 0;
    }
    Py_INCREF(pending);
    is = read_known_or_new(recorder, lane, pending, entry);
    Py_DECREF(pending);
    return is;
}

/* Remove the reads that have run, as `DeferredReads.pop` does. An error that is set stays set. */
static int remove_reads(PyObject *deferred, Py_ssize_t count)
{
    PyObject *type, *value, *trace, *seen = GET(DeferredReads, deferred, _seen);
    PyErr_Fetch(&type, &value, &trace);
    int failed = PyList_SetSlice(seen, 0, count, NULL);
    if (!failed && !PyList_GET_SIZE(seen)) {
        put(&GET(DeferredReads, deferred, is_due), Py_False);
        failed = put_count(&GET(DeferredReads, deferred, _bytes), 0) ||
                 put_count(&GET(DeferredReads, deferred, _most), PY_SSIZE_T_MAX);
    }
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
        return -1;
    }
    return failed ? -1 : 0;
}

static PyObject *read_many(PyObject *module, PyObject *args)
{
    PyObject *recorder, *reader, *deferred;
    if (core == NULL) {
        return PyErr_Format(PyExc_RuntimeError, "configure_device was not called");
    }
    if (!PyArg_ParseTuple(args, "O!O!O!", Recorder, &recorder, CudaReader, &reader, DeferredReads, &deferred)) {
        return NULL;
    }
    PyObject *lane = GET(DeferredReads, deferred, lane), *seen = GET(DeferredReads, deferred, _seen);
    Py_ssize_t count = 0;
    int is = IS(Lane, lane);
    Py_INCREF(lane);
    Py_INCREF(seen);
    while (is == 1 && count < PyList_GET_SIZE(seen)) {
        PyObject *entry = PyList_GET_ITEM(seen, count);
        Py_INCREF(entry);
        is = read_one(recorder, reader, lane, entry);
        Py_DECREF(entry);
        count += is != 0;
    }
    int failed = count && remove_reads(deferred, count);
    Py_DECREF(lane);
    Py_DECREF(seen);
    if (failed || is < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
