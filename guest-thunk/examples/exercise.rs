//! Uses a connection as hard as a program may: threads, waits, memory of both kinds, forks, signals. Prints a line for
//! each part, and ends with a status that is not 0 at the first that is wrong.
//!
//! Which host is chosen by the environment, as for the library: `VIRTIO_KFD_LOOPBACK`, `VIRTIO_KFD_DEVICE`.
//! Through loop-back the parts that need a second connection are left out: a daemon serves one VM.
#![allow(unsafe_code)] // mmap, fork and signals

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use guest_thunk::client::{Client, ClientError, LOOPBACK_VARIABLE};
use guest_thunk::transport::Blob;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferRequest, CreateEventRequest, EventId, EventRequest, Features, GpuId,
    GpuRequest, GuestVa, Nothing, WaitEvent, WaitEventsRequest,
};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// `KFD_IOC_ALLOC_MEM_FLAGS_*` of kfd_ioctl.h.
const VRAM: u32 = 1;
const USERPTR: u32 = 1 << 2;
const PUBLIC: u32 = 1 << 29;
const WRITABLE: u32 = 1 << 31;

/// Far from what this process has mapped, and inside the GPU's range.
const VA: u64 = 1 << 42;

const PAGE: u64 = 4096;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("exercise: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome {
    let alone = std::env::var_os(LOOPBACK_VARIABLE).is_some();
    let client = Client::connect()?;
    let part = |name: &str, run: &dyn Fn() -> Outcome| -> Outcome {
        let start = Instant::now();
        run().map_err(|error| format!("{name}: {error}"))?;
        println!("ok {name} {:?}", start.elapsed());
        Ok(())
    };
    part("threads", &|| threads(&client))?;
    part("waits", &|| waits(&client))?;
    if client.gpu_count() > 0 {
        let gpu = gpu(&client)?;
        part("guest memory", &|| guest_memory(&client, gpu))?;
        if client.features().contains(Features::HOST_BLOBS) {
            part("host memory", &|| host_memory(&client, gpu))?;
        }
    }
    part("forks", &|| forks(&client, alone))?;
    if !alone {
        part("signals", &signals)?;
        part("contexts", &contexts)?;
    }
    Ok(())
}

fn ensure(fact: bool, what: impl FnOnce() -> String) -> Outcome {
    if fact { Ok(()) } else { Err(what().into()) }
}

fn nop(client: &Client) -> Result<(), ClientError> {
    client.call::<Nop>(&Nothing {}, &[], 0).map(drop)
}

fn event(client: &Client) -> Result<EventId, ClientError> {
    let request = CreateEventRequest { auto_reset: 1, ..Default::default() };
    Ok(client.call::<CreateEvent>(&request, &[], 0)?.0.event_id)
}

fn set(client: &Client, event_id: EventId) -> Result<(), ClientError> {
    client.call::<SetEvent>(&EventRequest { event_id, pad: 0 }, &[], 0).map(drop)
}

/// Waits and gives `KFD_IOC_WAIT_RESULT_*`: 0 complete, 1 time-out.
fn wait(client: &Client, event_id: EventId, timeout: u32) -> Result<u32, ClientError> {
    let list = [WaitEvent { event_id, ..Default::default() }];
    let request = WaitEventsRequest { timeout, wait_for_all: 1 };
    client.wait_call::<WaitEvents>(&request, &list, 1).map(|(answer, _)| answer.wait_result)
}

fn gpu(client: &Client) -> Outcome<GpuId> {
    let (_, list) = client.call::<GetApertures>(&Nothing {}, &[], 64)?;
    let gpu_id = list.first().ok_or("no apertures")?.gpu_id;
    client.call::<AcquireVm>(&GpuRequest { gpu_id, pad: 0 }, &[], 0)?;
    Ok(gpu_id)
}

/// Runs the closure on many threads and gives the first failure.
fn on_threads(count: u32, run: impl Fn(u32) -> Result<(), String> + Sync) -> Outcome {
    let run = &run;
    let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|number| scope.spawn(move || run(number))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())))
            .collect()
    });
    Ok(results.into_iter().collect::<Result<(), String>>()?)
}

fn threads(client: &Client) -> Outcome {
    on_threads(8, |_| (0..200).try_for_each(|_| nop(client)).map_err(|error| error.to_string()))
}

/// More waits for ever than there are rings, each ended by its own event, while control calls go on.
fn waits(client: &Client) -> Outcome {
    const WAITS: u32 = 80;
    let events = (0..WAITS).map(|_| event(client)).collect::<Result<Vec<_>, _>>()?;
    let first = *events.first().ok_or("no events")?;
    ensure(wait(client, first, 0)? == 1, || "a look at an event that is not set".into())?;
    ensure(wait(client, first, 10)? == 1, || "a wait for an event that is not set".into())?;
    on_threads(WAITS + 1, |number| {
        let done = match events.get(number as usize) {
            Some(id) => wait(client, *id, u32::MAX).map(|result| result == 0),
            None => {
                std::thread::sleep(Duration::from_millis(300));
                // The last ones first: those that wait for a ring while all are taken.
                events
                    .iter()
                    .rev()
                    .try_for_each(|id| set(client, *id).and_then(|()| nop(client)))
                    .map(|()| true)
            }
        };
        match done {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!("wait {number} timed out")),
            Err(error) => Err(error.to_string()),
        }
    })?;
    ensure(wait(client, first, 0)? == 1, || "an auto-reset event is still set after its wait".into())
}

/// A blob mapped in this process.
struct View {
    address: *mut libc::c_void,
    length: usize,
}

impl View {
    fn of(blob: &dyn Blob) -> Outcome<View> {
        let length = usize::try_from(blob.size())?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping touches no existing memory.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
        ensure(address != libc::MAP_FAILED, || std::io::Error::last_os_error().to_string())?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let view = View { address, length };
        blob.map_fixed(GuestVa(address.expose_provenance() as u64), blob.size(), protection)?;
        Ok(view)
    }

    /// The first word of each page.
    fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        (0..self.length).step_by(PAGE as usize).map(|offset| {
            // SAFETY: the page lies in the mapping.
            let word = unsafe { self.address.byte_add(offset) };
            // SAFETY: the word is aligned and mapped as long as self, and only used atomically.
            unsafe { AtomicU64::from_ptr(word.cast()) }
        })
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the range is this object's own mapping; a failure leaves it mapped.
        let _ = unsafe { libc::munmap(self.address, self.length) };
    }
}

fn guest_memory(client: &Client, gpu: GpuId) -> Outcome {
    for size in [PAGE, 64 * PAGE, 2 << 20, (2 << 20) + PAGE, 64 << 20] {
        let blob = client.guest_memory(size)?;
        let view = View::of(&*blob)?;
        for (number, word) in (1u64..).zip(view.words()) {
            ensure(word.swap(number, Ordering::SeqCst) == 0, || {
                format!("page {number} of new memory is not 0")
            })?;
        }
        let again = View::of(&*blob)?;
        for (number, word) in (1u64..).zip(again.words()) {
            ensure(word.load(Ordering::SeqCst) == number, || format!("page {number} differs between views"))?;
        }
        let request = AllocMemoryRequest {
            va: GuestVa(VA),
            size,
            gpu_id: gpu,
            flags: USERPTR | WRITABLE,
            resource: blob.resource(),
            ..Default::default()
        };
        let mut batch = client.batch();
        let alloc = batch.push::<AllocMemory>(&request, &[], 0)?;
        let map = batch.push::<MapMemory>(&BufferRequest { handle: alloc.handle() }, &[gpu], 0)?;
        let answers = batch.run()?;
        let handle = answers.get(alloc)?.0.handle;
        answers.get(map)?;
        client.call::<UnmapMemory>(&BufferRequest { handle }, &[gpu], 0)?;
        client.call::<FreeMemory>(&BufferRequest { handle }, &[], 0)?;
    }
    Ok(())
}

fn host_memory(client: &Client, gpu: GpuId) -> Outcome {
    for (round, size) in (0u64..).zip([PAGE, 16 * PAGE, 2 << 20, (2 << 20) + PAGE, 16 << 20]) {
        let flags = VRAM | PUBLIC | WRITABLE;
        let request = AllocMemoryRequest { va: GuestVa(VA), size, gpu_id: gpu, flags, ..Default::default() };
        let (made, _) = client.call::<AllocMemory>(&request, &[], 0)?;
        ensure(made.mappable == 1, || format!("{size} bytes of public VRAM cannot be mapped"))?;
        let blob = client.host_memory(made.handle, size)?;
        let (one, other) = (View::of(&*blob)?, View::of(&*blob)?);
        for (number, word) in (round..).zip(one.words()) {
            word.store(number, Ordering::SeqCst);
        }
        for (number, word) in (round..).zip(other.words()) {
            ensure(word.load(Ordering::SeqCst) == number, || format!("page {number} differs between views"))?;
        }
        drop((one, other, blob));
        client.call::<FreeMemory>(&BufferRequest { handle: made.handle }, &[], 0)?;
    }
    Ok(())
}

/// C32: a child cannot use the parent's connection, and can make its own.
fn forks(client: &Client, alone: bool) -> Outcome {
    for _ in 0..8 {
        // SAFETY: no other thread of this program runs now, so the child may do anything.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: alarm has no preconditions; it ends a child that hangs.
            unsafe { libc::alarm(60) };
            client.abandon();
            let refused = matches!(nop(client), Err(ClientError::Forked { .. }));
            let anew = alone || Client::connect().is_ok_and(|own| nop(&own).is_ok());
            // SAFETY: _exit has no preconditions.
            unsafe { libc::_exit(i32::from(!(refused && anew))) };
        }
        let mut status = 0;
        // SAFETY: status is a place for an int.
        let waited = unsafe { libc::waitpid(child, &mut status, 0) };
        ensure(waited == child && status == 0, || format!("child {child} ended with {status:#x}"))?;
        nop(client)?;
    }
    Ok(())
}

/// C35: signals that interrupt system calls all the time.
fn signals() -> Outcome {
    extern "C" fn ignore(_: libc::c_int) {}
    let handler = ignore as extern "C" fn(libc::c_int);
    // SAFETY: all-zero is a valid sigaction; without SA_RESTART, interrupted calls fail with EINTR.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    // SAFETY: the handler does nothing, which is async-signal-safe.
    let result = unsafe { libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()) };
    ensure(result == 0, || "sigaction".into())?;
    let timer = |microseconds| {
        let interval = libc::timeval { tv_sec: 0, tv_usec: microseconds };
        let value = libc::itimerval { it_interval: interval, it_value: interval };
        // SAFETY: value lives beyond the call.
        let result = unsafe { libc::setitimer(libc::ITIMER_REAL, &value, std::ptr::null_mut()) };
        ensure(result == 0, || "setitimer".into())
    };
    timer(1000)?;
    for _ in 0..10 {
        let client = Client::connect()?;
        let id = event(&client)?;
        ensure(wait(&client, id, 20)? == 1, || "a wait under signals".into())?;
        ensure(!client.topology()?.is_empty(), || "an empty topology".into())?;
        let blob = client.guest_memory(64 * PAGE)?;
        View::of(&*blob)?;
    }
    timer(0)
}

/// Several contexts at once, and one after the other.
fn contexts() -> Outcome {
    let clients = (0..4).map(|_| Client::connect()).collect::<Result<Vec<_>, _>>()?;
    let events = clients.iter().map(event).collect::<Result<Vec<_>, _>>()?;
    for (client, id) in clients.iter().zip(&events).skip(1) {
        set(client, *id)?;
    }
    for (number, (client, id)) in clients.iter().zip(&events).enumerate() {
        let expected = u32::from(number == 0);
        ensure(wait(client, *id, 0)? == expected, || format!("the event of context {number}"))?;
    }
    drop(clients);
    for _ in 0..10 {
        nop(&Client::connect()?)?;
    }
    Ok(())
}
