//! The client through loop-back against the real daemon and worker on the KFD model.
//!
//! The programs are looked for in `VIRTIO_KFD_BIN_DIR`, else beside this test's own build. Where they have not been
//! built, the tests say so and pass.
#![cfg(feature = "loopback")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // a test fails by panicking
#![allow(unsafe_code)] // mmap, signals and fork

mod support;

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use guest_thunk::client::{Client, ClientError};
use guest_thunk::transport::loopback::{LoopbackOptions, LoopbackVm};
use guest_thunk::transport::{Blob, TransportError};
use support::Daemon;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferRequest, CreateEventRequest, EventId, EventRequest, GpuId, GpuRequest, GuestVa,
    ImportMemoryRequest, MapRangeRequest, Nothing, ResourceInfoAnswer, ResourceRequest, ShareMemoryRequest,
    Status, UnmapRangeRequest, WaitEvent, WaitEventsRequest,
};

/// `KFD_IOC_ALLOC_MEM_FLAGS_*` of kfd_ioctl.h.
const VRAM: u32 = 1;
const USERPTR: u32 = 1 << 2;
const PUBLIC: u32 = 1 << 29;
const WRITABLE: u32 = 1 << 31;

/// Far from what this process has mapped, and inside the GPU's range.
const VA: u64 = 1 << 42;

const PAGE: u64 = 4096;

impl Daemon {
    fn vm(&self) -> LoopbackVm {
        self.vm_with(LoopbackOptions::default())
    }

    fn vm_with(&self, options: LoopbackOptions) -> LoopbackVm {
        LoopbackVm::connect_with(&self.socket(), &options).unwrap()
    }

    /// Pids of the daemon's workers that serve contexts.
    fn workers(&self) -> Vec<i32> {
        let of = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            let mut rest = rest.split_whitespace();
            let (state, parent) = (rest.next()?, rest.next()?);
            (name.starts_with("kfd-worker") && state != "Z" && parent == self.child.id().to_string())
                .then(|| pid.parse().ok())?
        };
        let entries = std::fs::read_dir("/proc").unwrap();
        entries.filter_map(|entry| of(entry.ok()?.file_name().to_str()?)).collect()
    }
}

fn client(vm: &LoopbackVm) -> Client {
    Client::over(Box::new(vm.context().unwrap())).unwrap()
}

fn nop(client: &Client) -> Result<(), ClientError> {
    client.call::<Nop>(&Nothing {}, &[], 0).map(drop)
}

fn event(client: &Client) -> EventId {
    let request = CreateEventRequest { auto_reset: 1, ..Default::default() };
    client.call::<CreateEvent>(&request, &[], 0).unwrap().0.event_id
}

fn set(client: &Client, event_id: EventId) {
    client.call::<SetEvent>(&EventRequest { event_id, pad: 0 }, &[], 0).unwrap();
}

/// Waits and gives `KFD_IOC_WAIT_RESULT_*`: 0 complete, 1 time-out.
fn wait(client: &Client, event_id: EventId, timeout: u32) -> Result<u32, ClientError> {
    let list = [WaitEvent { event_id, ..Default::default() }];
    let request = WaitEventsRequest { timeout, wait_for_all: 1 };
    client.wait_call::<WaitEvents>(&request, &list, 1).map(|(answer, _)| answer.wait_result)
}

/// The first GPU, ready for buffers.
fn gpu(client: &Client) -> GpuId {
    let (_, list) = client.call::<GetApertures>(&Nothing {}, &[], 64).unwrap();
    let gpu_id = list[0].gpu_id;
    client.call::<AcquireVm>(&GpuRequest { gpu_id, pad: 0 }, &[], 0).unwrap();
    gpu_id
}

/// A blob mapped in this process.
struct View {
    address: *mut u8,
    length: usize,
}

impl View {
    fn of(blob: &dyn Blob) -> View {
        let length = blob.size() as usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping touches no existing memory.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        blob.map_fixed(GuestVa(address.expose_provenance() as u64), blob.size(), protection).unwrap();
        View { address: address.cast(), length }
    }

    /// The word of page `page`.
    fn word(&self, page: usize) -> &AtomicU64 {
        let offset = page * PAGE as usize;
        assert!(offset < self.length);
        // SAFETY: the page lies in the mapping.
        let word = unsafe { self.address.add(offset) };
        // SAFETY: the word is aligned and mapped as long as self, and only used atomically.
        unsafe { AtomicU64::from_ptr(word.cast()) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the range is this object's own mapping.
        let result = unsafe { libc::munmap(self.address.cast(), self.length) };
        assert_eq!(result, 0);
    }
}

#[test]
fn calls_batches_and_topology_go_through() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let client = client(&vm);
    assert_eq!(client.gpu_count(), 1);
    nop(&client).unwrap();
    let mut batch = client.batch();
    let tickets: Vec<_> = (0..64).map(|_| batch.push::<Nop>(&Nothing {}, &[], 0).unwrap()).collect();
    let answers = batch.run().unwrap();
    for ticket in tickets {
        answers.get(ticket).unwrap();
    }
    let files = client.topology().unwrap();
    assert!(files.iter().any(|file| file.path == "nodes/1/gpu_id"), "{files:?}");
}

#[test]
fn eight_threads_make_a_thousand_calls_each_in_scattered_memory() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm_with(LoopbackOptions { ram_bytes: 5 << 30, scatter: true, ..Default::default() });
    let client = client(&vm);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..1000).for_each(|_| nop(&client).unwrap()));
        }
    });
}

/// More threads than frames that the host holds, and more waits than rings.
#[test]
fn a_hundred_threads_call_and_wait() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let client = client(&vm);
    let events: Vec<EventId> = (0..100).map(|_| event(&client)).collect();
    std::thread::scope(|scope| {
        for id in &events {
            scope.spawn(|| assert_eq!(wait(&client, *id, u32::MAX).unwrap(), 0));
        }
        for _ in 0..100 {
            scope.spawn(|| (0..10).for_each(|_| nop(&client).unwrap()));
        }
        for id in events.iter().rev() {
            set(&client, *id);
        }
    });
}

#[test]
fn more_waits_than_the_control_queue_has_places_keep_no_process_out() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    // Five processes with a wait on each ring: 310, where the queue has 256 places.
    let clients: Vec<_> = (0..5).map(|_| client(&vm)).collect();
    let events: Vec<(usize, EventId)> = (0..clients.len())
        .flat_map(|at| (0..62).map(move |_| at))
        .map(|at| (at, event(&clients[at])))
        .collect();
    let begun = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (at, id) in &events {
            scope.spawn(|| {
                begun.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                assert_eq!(wait(&clients[*at], *id, u32::MAX).unwrap(), 0);
            });
        }
        while begun.load(std::sync::atomic::Ordering::SeqCst) < events.len() {
            std::thread::yield_now();
        }
        // Time for the last ones to be sent; with fewer in flight the test only sees less.
        std::thread::sleep(Duration::from_millis(200));
        // A process that comes now is served, and all who wait still are.
        let late = self::client(&vm);
        nop(&late).unwrap();
        drop(late);
        clients.iter().for_each(|client| nop(client).unwrap());
        for (at, id) in events.iter().rev() {
            set(&clients[*at], *id);
        }
    });
}

#[test]
fn a_wait_blocks_its_ring_only_and_ends_with_its_event() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let client = client(&vm);
    let (first, second) = (event(&client), event(&client));
    assert_eq!(wait(&client, first, 0).unwrap(), 1);
    assert_eq!(wait(&client, first, 10).unwrap(), 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| wait(&client, first, u32::MAX).unwrap());
        for _ in 0..100 {
            nop(&client).unwrap();
        }
        set(&client, second);
        assert_eq!(wait(&client, second, u32::MAX).unwrap(), 0, "another wait goes on meanwhile");
        assert!(!waiting.is_finished());
        set(&client, first);
        assert_eq!(waiting.join().unwrap(), 0);
    });
    assert_eq!(wait(&client, first, 0).unwrap(), 1, "the wait has cleared the auto-reset event");
}

#[test]
fn contexts_of_a_vm_are_apart() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let (one, other) = (client(&vm), client(&vm));
    let ids = (event(&one), event(&other));
    set(&one, ids.0);
    assert_eq!(wait(&other, ids.1, 0).unwrap(), 1, "an event of another KFD process");
    assert_eq!(wait(&one, ids.0, 0).unwrap(), 0);
    drop(one);
    nop(&other).unwrap();
}

#[test]
fn guest_memory_is_given_to_the_gpu_and_comes_back_zeroed() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm_with(LoopbackOptions { ram_bytes: 1 << 30, scatter: true, ..Default::default() });
    let client = client(&vm);
    let gpu = gpu(&client);
    for _ in 0..3 {
        let blob = client.guest_memory(64 * PAGE).unwrap();
        let view = View::of(&*blob);
        for page in 0..64 {
            assert_eq!(view.word(page).swap(page as u64 + 1, Ordering::SeqCst), 0);
        }
        let request = AllocMemoryRequest {
            va: GuestVa(VA),
            size: blob.size(),
            gpu_id: gpu,
            flags: USERPTR | WRITABLE,
            resource: blob.resource(),
            ..Default::default()
        };
        let mut batch = client.batch();
        let alloc = batch.push::<AllocMemory>(&request, &[], 0).unwrap();
        let buffer = BufferRequest { handle: alloc.handle() };
        let map = batch.push::<MapMemory>(&buffer, &[gpu], 0).unwrap();
        let answers = batch.run().unwrap();
        let handle = answers.get(alloc).unwrap().0.handle;
        assert_eq!(answers.get(map).unwrap().0.n_success, 1);
        let other = client.guest_memory(PAGE).unwrap();
        let beyond =
            AllocMemoryRequest { va: GuestVa(VA * 2), size: 2 * PAGE, resource: other.resource(), ..request };
        let error = client.call::<AllocMemory>(&beyond, &[], 0).unwrap_err();
        assert_eq!(error.status().map(|(status, _)| status), Some(Status::BAD_RESOURCE), "{error}");
        client.call::<UnmapMemory>(&BufferRequest { handle }, &[gpu], 0).unwrap();
        client.call::<FreeMemory>(&BufferRequest { handle }, &[], 0).unwrap();
    }
}

#[test]
fn host_memory_is_the_same_in_every_view_and_leaves_nothing_in_the_window() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let client = client(&vm);
    let gpu = gpu(&client);
    let size = 16 * PAGE;
    let window = vm.window().expect("the daemon has a window");
    for round in 0..20 {
        let request = AllocMemoryRequest {
            va: GuestVa(VA),
            size,
            gpu_id: gpu,
            flags: VRAM | PUBLIC | WRITABLE,
            ..Default::default()
        };
        let (made, _) = client.call::<AllocMemory>(&request, &[], 0).unwrap();
        assert_eq!(made.mappable, 1);
        let blob = client.host_memory(made.handle, size).unwrap();
        let (one, other) = (View::of(&*blob), View::of(&*blob));
        for page in [15, 0, 7] {
            one.word(page).store(round + 40, Ordering::SeqCst);
            assert_eq!(other.word(page).load(Ordering::SeqCst), round + 40);
        }
        assert!(window.maps() > 0);
        drop((one, other, blob));
        assert_eq!(window.maps(), 0, "round {round}");
        client.call::<FreeMemory>(&BufferRequest { handle: made.handle }, &[], 0).unwrap();
    }
    let error = client.host_memory(virtio_kfd_protocol::Handle::new(5, 77), PAGE).map(drop).unwrap_err();
    assert!(matches!(error, ClientError::Transport(_)), "{error}");
    nop(&client).unwrap();
}

/// What Linux does with dma-bufs of its own device: the importer in the same file gets the handle that it has, and the
/// memory stays while the descriptor is open.
#[test]
fn a_dma_buf_is_the_blob_again_and_keeps_it() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let client = client(&vm);
    let blob = client.guest_memory(4 * PAGE).unwrap();
    View::of(&*blob).word(3).store(77, Ordering::SeqCst);
    let dma_buf = blob.export().unwrap();
    let again = client.import(dma_buf.as_fd()).unwrap();
    assert_eq!((again.resource(), again.size()), (blob.resource(), 4 * PAGE));
    drop(blob);
    assert_eq!(View::of(&*again).word(3).load(Ordering::SeqCst), 77, "the importer has it");
    drop(again);
    let late = client.import(dma_buf.as_fd()).unwrap();
    assert_eq!(View::of(&*late).word(3).load(Ordering::SeqCst), 77, "the descriptor kept it");
    // What is none of this device's.
    let (read, write) = nix::unistd::pipe().unwrap();
    for foreign in [read.as_fd(), write.as_fd(), std::io::stdin().as_fd()] {
        let error = client.import(foreign).map(drop).unwrap_err();
        assert!(matches!(error, ClientError::Transport(TransportError::NotSupported(_))), "{error}");
    }
    // Nothing is left over of many rounds. (Other tests of this process have some descriptors, too.)
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    for _ in 0..2000 {
        drop(late.export().unwrap());
    }
    assert!(descriptors() < before + 500, "{before} descriptors became {}", descriptors());
}

/// What one guest process shares another one has: by a token, by a dma-buf, and for as long as it likes.
#[test]
fn contexts_share_memory_by_token_and_by_dma_buf() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let transports = [vm.context().unwrap(), vm.context().unwrap()];
    let [one, other] = transports.map(|context| Client::over(Box::new(context)).unwrap());
    let gpu_id = gpu(&one);
    assert_eq!(gpu(&other), gpu_id);
    // A piece of a buffer without an address, as the library's arenas are.
    let size = 16 * PAGE;
    let request = AllocMemoryRequest { size, gpu_id, flags: VRAM | PUBLIC | WRITABLE, ..Default::default() };
    let handle = one.call::<AllocMemory>(&request, &[], 0).unwrap().0.handle;
    let whole = one.host_memory(handle, size).unwrap();
    View::of(&*whole).word(5).store(55, Ordering::SeqCst);
    let share = ShareMemoryRequest { handle, offset: 4 * PAGE, size: 8 * PAGE };
    let token = one.call::<ShareMemory>(&share, &[], 0).unwrap().0.token;
    let check = |blob: Box<dyn Blob>| {
        let resource = blob.resource();
        let info = other.call::<ResourceInfo>(&ResourceRequest { resource, pad: 0 }, &[], 0).unwrap().0;
        assert_eq!((info.kind, info.size, info.gpu_id), (ResourceInfoAnswer::HOST, 8 * PAGE, gpu_id));
        let import = ImportMemoryRequest { resource, gpu_id, va: GuestVa(0) };
        let imported = other.call::<ImportMemory>(&import, &[], 0).unwrap().0;
        assert_eq!(imported.size, 8 * PAGE);
        let map = MapRangeRequest {
            handle: imported.handle,
            offset: 0,
            size: 8 * PAGE,
            va: GuestVa(VA),
            gpu_id,
            // AMDGPU_VM_PAGE_READABLE, WRITEABLE
            flags: 2 | 4,
        };
        other.call::<MapRange>(&map, &[], 0).unwrap();
        let view = View::of(&*blob);
        assert_eq!(view.word(1).load(Ordering::SeqCst), 55, "the piece begins at page 4");
        view.word(1).store(56, Ordering::SeqCst);
        assert_eq!(View::of(&*whole).word(5).swap(55, Ordering::SeqCst), 56);
        let unmap =
            UnmapRangeRequest { handle: imported.handle, va: GuestVa(VA), size: 8 * PAGE, gpu_id, pad: 0 };
        other.call::<UnmapRange>(&unmap, &[], 0).unwrap();
        other.call::<FreeMemory>(&BufferRequest { handle: imported.handle }, &[], 0).unwrap();
    };
    check(other.host_blob(token.0, 8 * PAGE, true).unwrap());
    // The same as a dma-buf: of a blob over exactly the piece, in the context that has it.
    let piece = one.host_blob(token.0, 8 * PAGE, true).unwrap();
    let dma_buf = piece.export().unwrap();
    check(other.import(dma_buf.as_fd()).unwrap());
    let kept = other.import(dma_buf.as_fd()).unwrap();
    drop((piece, dma_buf));
    assert!(other.host_blob(token.0 ^ 1, 8 * PAGE, true).is_err(), "a forged token");
    // The original goes; who has the memory keeps it.
    one.call::<FreeMemory>(&BufferRequest { handle }, &[], 0).unwrap();
    drop(whole);
    assert_eq!(View::of(&*kept).word(1).load(Ordering::SeqCst), 55);
    // Guest memory goes the same way, as a dma-buf.
    let memory = one.guest_memory(4 * PAGE).unwrap();
    View::of(&*memory).word(2).store(9, Ordering::SeqCst);
    let taken = other.import(memory.export().unwrap().as_fd()).unwrap();
    let request = ResourceRequest { resource: taken.resource(), pad: 0 };
    let info = other.call::<ResourceInfo>(&request, &[], 0).unwrap().0;
    assert_eq!((info.kind, info.size), (ResourceInfoAnswer::GUEST, 4 * PAGE));
    let user = AllocMemoryRequest {
        va: GuestVa(VA),
        size: 4 * PAGE,
        gpu_id,
        flags: USERPTR | WRITABLE,
        resource: taken.resource(),
        ..Default::default()
    };
    let handle = other.call::<AllocMemory>(&user, &[], 0).unwrap().0.handle;
    drop(memory);
    assert_eq!(View::of(&*taken).word(2).load(Ordering::SeqCst), 9);
    other.call::<FreeMemory>(&BufferRequest { handle }, &[], 0).unwrap();
}

/// QEMU 11.1 aborts with 512 memory regions, and each map is one.
#[test]
fn more_maps_than_a_vmm_bears_are_refused_and_the_rest_goes_on() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let client = client(&vm);
    let gpu = gpu(&client);
    let mut kept = Vec::new();
    let mut refused = 0;
    for number in 0..600 {
        let request = AllocMemoryRequest {
            va: GuestVa(VA + number * PAGE),
            size: PAGE,
            gpu_id: gpu,
            flags: VRAM | PUBLIC | WRITABLE,
            ..Default::default()
        };
        let (made, _) = client.call::<AllocMemory>(&request, &[], 0).unwrap();
        match client.host_memory(made.handle, PAGE) {
            Ok(blob) => kept.push(blob),
            Err(error) => {
                assert!(matches!(error, ClientError::Transport(_)), "{error}");
                refused += 1;
            }
        }
    }
    let most = vm.window().unwrap().most_maps();
    assert!(most < 500 && most > 100, "{most} maps at once");
    assert_eq!(kept.len() + refused, 600);
    let first = View::of(&*kept[0]);
    first.word(0).store(1, Ordering::SeqCst);
    drop((first, kept));
    assert_eq!(vm.window().unwrap().maps(), 0);
    nop(&client).unwrap();
}

#[test]
fn a_daemon_that_serves_another_vm_is_an_error_and_no_hang() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let options = LoopbackOptions { patience: Duration::from_millis(300), ..Default::default() };
    let error = LoopbackVm::connect_with(&daemon.socket(), &options).map(drop).unwrap_err().to_string();
    assert!(error.contains("another VM"), "{error}");
    nop(&client(&vm)).unwrap();
    drop(vm);
    nop(&client(&daemon.vm())).unwrap();
}

#[test]
fn a_killed_worker_loses_its_context_and_no_other() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let doomed = client(&vm);
    let workers = daemon.workers();
    let [worker] = workers.as_slice() else { panic!("one worker of {workers:?}") };
    let other = client(&vm);
    let id = event(&doomed);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| wait(&doomed, id, u32::MAX));
        for _ in 0..20 {
            nop(&doomed).unwrap();
        }
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(*worker), nix::sys::signal::Signal::SIGKILL)
            .unwrap();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, ClientError::Lost(_)), "{error}");
    });
    assert!(matches!(nop(&doomed), Err(ClientError::Lost(_))));
    assert!(doomed.is_lost());
    nop(&other).unwrap();
    drop(doomed);
    nop(&client(&vm)).unwrap();
}

#[test]
fn a_daemon_that_ends_loses_all_and_blocks_nobody() {
    let Some(mut daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let client = client(&vm);
    let id = event(&client);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| wait(&client, id, u32::MAX));
        nop(&client).unwrap();
        daemon.child.kill().unwrap();
        daemon.child.wait().unwrap();
        assert!(matches!(waiting.join().unwrap(), Err(ClientError::Lost(_))));
    });
    assert!(matches!(nop(&client), Err(ClientError::Lost(_))));
}

/// C35: signals that interrupt system calls all the time.
#[test]
fn a_profiling_timer_disturbs_nothing() {
    extern "C" fn ignore(_: libc::c_int) {}
    let Some(daemon) = Daemon::start() else { return };
    static STARTED: AtomicBool = AtomicBool::new(false);
    assert!(!STARTED.swap(true, Ordering::Relaxed));
    // SAFETY: all-zero is a valid sigaction; without SA_RESTART, interrupted calls fail with EINTR.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
    // SAFETY: the handler does nothing, which is async-signal-safe.
    assert_eq!(unsafe { libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()) }, 0);
    let timer = |microseconds| {
        let interval = libc::timeval { tv_sec: 0, tv_usec: microseconds };
        let value = libc::itimerval { it_interval: interval, it_value: interval };
        // SAFETY: value lives beyond the call.
        assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &value, std::ptr::null_mut()) }, 0);
    };
    timer(300);
    for _ in 0..10 {
        let vm = daemon.vm();
        let client = client(&vm);
        for _ in 0..50 {
            nop(&client).unwrap();
        }
        let id = event(&client);
        assert_eq!(wait(&client, id, 20).unwrap(), 1);
        assert!(!client.topology().unwrap().is_empty());
    }
    timer(0);
}

/// C32, C34: the child gets errors, and the parent's VM goes on, whatever the child drops.
#[test]
fn a_forked_child_neither_uses_nor_breaks_the_vm() {
    let Some(daemon) = Daemon::start() else { return };
    let vm = daemon.vm();
    let client = client(&vm);
    let blob = client.guest_memory(PAGE).unwrap();
    for round in 0..20 {
        // SAFETY: this process has other threads, so the child only makes calls that take no lock and allocate
        // nothing, then exits without running destructors.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: back to the default, which ends the process; another test of this program has a handler.
            unsafe { libc::signal(libc::SIGALRM, libc::SIG_DFL) };
            // SAFETY: alarm has no preconditions; it ends a child that hangs.
            unsafe { libc::alarm(20) };
            if round % 2 == 0 {
                client.abandon();
            }
            let refused = matches!(nop(&client), Err(ClientError::Forked { .. }))
                && blob.map_fixed(GuestVa(VA), PAGE, libc::PROT_READ).is_err();
            drop(blob);
            // SAFETY: _exit has no preconditions.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: status is a place for an int.
        let waited = unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        nop(&client).unwrap();
    }
    let view = View::of(&*blob);
    view.word(0).store(1, Ordering::SeqCst);
}
