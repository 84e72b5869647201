//! A process that behaves, and checks that nobody else's doings show in its answers.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use guest_thunk::client::{Client, ClientError};
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferRequest, CallType, CreateEventRequest, EventId, EventRequest, GpuId,
    GpuRequest, GuestVa, Handle, Nothing, ReadSmiRequest, SMI_CLOSED, WaitEvent, WaitEventsRequest,
};

use crate::raw::{View, client};

/// `KFD_IOC_ALLOC_MEM_FLAGS_VRAM`, and `..._USERPTR` (kfd_ioctl.h), each with `..._WRITABLE`.
pub const VRAM: u32 = 1 | 1 << 31;
pub const USERPTR: u32 = 1 << 2 | 1 << 31;

/// Where buffers go: in the GPU's range of addresses and far from what a process of this size has mapped.
pub const VA: u64 = 1 << 42;

/// Environment variable: after its rounds the process (and its VM, in loop-back) stays, until it is killed.
const LINGER_VARIABLE: &str = "KFD_HOSTILE_LINGER";

/// `KFD_IOC_WAIT_RESULT_*`
const COMPLETE: u32 = 0;
const TIMEOUT: u32 = 1;

/// The first GPU, if the VM has one, ready for buffers.
pub fn acquire(client: &Client) -> Result<Option<GpuId>> {
    let (_, list) = client.call::<GetApertures>(&Nothing {}, &[], 64).context("GetApertures")?;
    let Some(gpu_id) = list.first().map(|apertures| apertures.gpu_id) else { return Ok(None) };
    client.call::<AcquireVm>(&GpuRequest { gpu_id, pad: 0 }, &[], 0).context("AcquireVm")?;
    Ok(Some(gpu_id))
}

pub fn create(client: &Client, auto_reset: u32) -> Result<EventId> {
    let request = CreateEventRequest { auto_reset, ..Default::default() };
    Ok(client.call::<CreateEvent>(&request, &[], 0).context("CreateEvent")?.0.event_id)
}

fn by_id<C>(client: &Client, event_id: EventId) -> Result<(), ClientError>
where
    C: CallType<Request = EventRequest>,
{
    client.call::<C>(&EventRequest { event_id, pad: 0 }, &[], 0).map(drop)
}

fn wait(client: &Client, event_id: EventId, timeout: u32) -> Result<u32> {
    let list = [WaitEvent { event_id, ..Default::default() }];
    let request = WaitEventsRequest { timeout, wait_for_all: 1 };
    let (answer, _) = client.wait_call::<WaitEvents>(&request, &list, 1).context("WaitEvents")?;
    ensure!(answer.errno == 0, "WaitEvents: errno {}", answer.errno);
    Ok(answer.wait_result)
}

/// Allocates, maps, unmaps and frees a buffer at an address of the caller's choice.
fn buffer(client: &Client, gpu: GpuId, number: u64) -> Result<()> {
    let va = GuestVa(VA.wrapping_add((number % 64) << 21));
    let request = AllocMemoryRequest { va, size: 64 * 1024, gpu_id: gpu, flags: VRAM, ..Default::default() };
    let mut batch = client.batch();
    let alloc = batch.push::<AllocMemory>(&request, &[], 0)?;
    let map = batch.push::<MapMemory>(&BufferRequest { handle: alloc.handle() }, &[gpu], 0)?;
    let answers = batch.run()?;
    let (made, _) = answers.get(alloc).context("AllocMemory")?;
    let (mapped, _) = answers.get(map).context("MapMemory")?;
    ensure!(mapped.n_success == 1, "MapMemory: on {} of 1 GPU", mapped.n_success);
    let request = BufferRequest { handle: made.handle };
    client.call::<UnmapMemory>(&request, &[gpu], 0).context("UnmapMemory")?;
    client.call::<FreeMemory>(&request, &[], 0).context("FreeMemory")?;
    ensure!(client.call::<FreeMemory>(&request, &[], 0).is_err(), "a buffer was freed twice");
    Ok(())
}

/// Nobody's memory fault shows in the streams of this process, which has none.
fn quiet(client: &Client) -> Result<()> {
    let request = ReadSmiRequest { timeout: 0, pad: 0 };
    let (answer, text) =
        client.wait_call::<ReadSmi>(&request, &[], ReadSmi::ANSWER_TAIL_MAX).context("ReadSmi")?;
    ensure!(answer.outcome != SMI_CLOSED, "a stream is gone");
    // `KFD_SMI_EVENT_VMFAULT`
    let fault = text.split(|byte| *byte == b'\n').any(|line| line.starts_with(b"1 "));
    ensure!(!fault, "another process's fault: {:?}", String::from_utf8_lossy(&text));
    Ok(())
}

/// Calls and checks until the input ends.
pub fn run() -> Result<()> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rest = Vec::new();
            // An input that cannot be read has ended as well.
            let _ = std::io::stdin().read_to_end(&mut rest);
            done.store(true, Ordering::Release);
        });
        let rounds = watch(&done, || {
            println!("ready");
            std::io::stdout().flush()
        });
        let Ok(rounds) = rounds else {
            // Without waiting for the thread that reads.
            eprintln!("kfd-hostile: neighbour: {rounds:?}");
            std::process::exit(1);
        };
        println!("neighbour: {rounds} rounds, all answers right");
        Ok(())
    })
}

/// Calls and checks until told to stop; at least once. Gives the number of rounds.
pub fn watch(done: &AtomicBool, ready: impl FnOnce() -> std::io::Result<()>) -> Result<u64> {
    let client = client()?;
    let gpu = acquire(&client)?;
    let untouched = create(&client, 0)?;
    let own = create(&client, 1)?;
    let stream = gpu.map(|gpu_id| client.call::<OpenSmi>(&GpuRequest { gpu_id, pad: 0 }, &[], 0));
    let stream = stream.transpose().context("OpenSmi")?;
    ready()?;
    let mut rounds = 0u64;
    let mut last = 0;
    loop {
        let (clocks, _) =
            client.call::<GetClockCounters>(&GpuRequest::default(), &[], 0).context("GetClockCounters")?;
        ensure!(clocks.system_clock_counter > last, "the system clock went back");
        last = clocks.system_clock_counter;
        ensure!(wait(&client, untouched, 0)? == TIMEOUT, "an event that nobody set is set");
        by_id::<SetEvent>(&client, own).context("SetEvent")?;
        ensure!(wait(&client, own, 10_000)? == COMPLETE, "an event that was set is not");
        ensure!(wait(&client, own, 0)? == TIMEOUT, "an auto-reset event stayed set");
        let short = create(&client, 1)?;
        by_id::<DestroyEvent>(&client, short).context("DestroyEvent")?;
        ensure!(by_id::<DestroyEvent>(&client, short).is_err(), "an event was destroyed twice");
        if let Some(gpu) = gpu {
            buffer(&client, gpu, rounds)?;
        }
        if stream.is_some() {
            quiet(&client)?;
        }
        rounds = rounds.wrapping_add(1);
        if done.load(Ordering::Acquire) {
            return Ok(rounds);
        }
    }
}

/// Takes resources of every kind and waits for ever.
pub fn hold() -> Result<()> {
    let client = client()?;
    let blob = client.guest_memory(1 << 20)?;
    if let Some(gpu) = acquire(&client)? {
        take(&client, gpu)?;
    }
    let event = create(&client, 1)?;
    println!("ready: event {}, blob {}", event.0, blob.resource().0);
    std::io::stdout().flush()?;
    let result = wait(&client, event, u32::MAX)?;
    bail!("the wait ended with result {result}")
}

/// Takes the dma-buf of another process, which is the standard input, finds all bytes to be `byte` and leaves `next` in them.
pub fn take_shared(byte: u64, next: u64) -> Result<()> {
    let (byte, next) = (u8::try_from(byte)?, u8::try_from(next)?);
    let client = client()?;
    let blob = client.import(std::io::stdin().as_fd()).context("import of the standard input")?;
    let view = View::of(&*blob)?;
    let found = view.copy(0, usize::try_from(blob.size())?);
    let wrong = found.iter().position(|found| *found != byte);
    ensure!(wrong.is_none(), "byte {wrong:?} of the memory is not {byte}");
    view.fill(next);
    println!("took {} bytes", blob.size());
    Ok(())
}

/// VRAM and guest memory on a GPU, not given back.
fn take(client: &Client, gpu: GpuId) -> Result<()> {
    let vram =
        AllocMemoryRequest { va: GuestVa(VA), size: 1 << 20, gpu_id: gpu, flags: VRAM, ..Default::default() };
    let (made, _) = client.call::<AllocMemory>(&vram, &[], 0).context("AllocMemory of VRAM")?;
    client
        .call::<MapMemory>(&BufferRequest { handle: made.handle }, &[gpu], 0)
        .context("MapMemory of VRAM")?;
    Ok(())
}

/// Connects, takes resources, and closes.
pub fn rounds(rounds: u64) -> Result<()> {
    for round in 0..rounds {
        let one = || -> Result<()> {
            let client = client()?;
            // Every kind now and then: most of the time is the connection's own.
            let _blob = (round % 4 == 0).then(|| client.guest_memory(1 << 16)).transpose()?;
            if let Some(gpu) = acquire(&client)?
                && round % 4 == 1
            {
                take(&client, gpu)?;
            }
            if round % 4 == 2 {
                create(&client, 1)?;
            }
            ensure!(client.call::<FreeMemory>(&BufferRequest { handle: Handle::new(0, 9) }, &[], 0).is_err());
            Ok(())
        };
        one().with_context(|| format!("round {round}"))?;
    }
    println!("rounds: {rounds}");
    std::io::stdout().flush()?;
    if std::env::var_os(LINGER_VARIABLE).is_some() {
        loop {
            std::thread::park();
        }
    }
    Ok(())
}
