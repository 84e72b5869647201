//! Questions through the whole stack: the guest library's client, loop-back, daemon, worker, and the KFD under it.

use std::time::Duration;

use guest_thunk::client::{Client, ClientError};
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::*;

use crate::transcript::{Transcript, errno_name};

fn failed(error: &ClientError) -> String {
    match error.status() {
        Some((Status::ERRNO, errno)) => errno_name(errno as i32),
        Some((status, _)) => status.to_string(),
        None => error.to_string(),
    }
}

fn show<T>(answer: Result<T, ClientError>, text: impl FnOnce(T) -> String) -> String {
    answer.map_or_else(|error| failed(&error), text)
}

fn ok<T>(answer: Result<T, ClientError>) -> String {
    show(answer, |_| "ok".into())
}

pub fn run(out: &mut Transcript) -> anyhow::Result<()> {
    let client = Client::connect()?;
    let (major, minor) = client.kfd_version();
    out.line("KFD version", format!("{major}.{minor}"));
    out.line("GPUs", client.gpu_count());
    topology(&client, out)?;
    process(&client, out);
    memory(&client, out);
    events(&client, out);
    Ok(())
}

fn topology(client: &Client, out: &mut Transcript) -> anyhow::Result<()> {
    let files = client.topology()?;
    for file in &files {
        // The machine's own numbers differ; what files there are does not.
        out.line("topology file", &file.path);
    }
    Ok(())
}

fn process(client: &Client, out: &mut Transcript) {
    let none = GpuRequest::default();
    let unknown = GpuRequest { gpu_id: GpuId(1234), pad: 0 };
    let apertures = client.call::<GetApertures>(&Nothing {}, &[], 64);
    out.line("GetApertures", show(apertures, |(_, list)| format!("{} nodes", list.len())));
    let clocks = client.call::<GetClockCounters>(&none, &[], 0);
    out.line(
        "GetClockCounters of no GPU",
        show(clocks, |(clocks, _)| {
            format!("{} Hz, GPU {}", clocks.system_clock_freq, clocks.gpu_clock_counter)
        }),
    );
    out.line("AcquireVm of GPU 1234", ok(client.call::<AcquireVm>(&unknown, &[], 0)));
    out.line("AvailableMemory of GPU 1234", ok(client.call::<AvailableMemory>(&unknown, &[], 0)));
    out.line("RenderVersion of GPU 1234", ok(client.call::<RenderVersion>(&unknown, &[], 0)));
    for mode in [-1, 0, 1] {
        let answer = client.call::<SetXnackMode>(&XnackMode { mode, pad: 0 }, &[], 0);
        out.line(&format!("SetXnackMode {mode}"), show(answer, |(answer, _)| answer.mode.to_string()));
    }
    for mode in [1, 1, 0, 0] {
        let request = RuntimeEnableRequest { mode, ..Default::default() };
        let answer = client.call::<RuntimeEnable>(&request, &[], 0);
        out.line(
            &format!("RuntimeEnable {mode}"),
            show(answer, |(answer, _)| format!("{:#x}", answer.capabilities)),
        );
    }
}

fn memory(client: &Client, out: &mut Transcript) {
    let request = AllocMemoryRequest {
        va: GuestVa(1 << 32),
        size: 4096,
        gpu_id: GpuId(1234),
        flags: 2,
        ..Default::default()
    };
    out.line("AllocMemory of GPU 1234", ok(client.call::<AllocMemory>(&request, &[], 0)));
    for handle in [Handle::NONE, Handle::new(0, 1), Handle::new(7, 7), Handle::in_frame(0)] {
        let request = BufferRequest { handle };
        out.line(&format!("FreeMemory of {handle:?}"), ok(client.call::<FreeMemory>(&request, &[], 0)));
        let answer = client.call::<MapMemory>(&request, &[GpuId(1234)], 0);
        out.line(&format!("MapMemory of {handle:?}"), ok(answer));
    }
}

struct Events<'c>(&'c Client);

impl Events<'_> {
    fn create(&self, event_type: u32, auto_reset: u32) -> Result<CreateEventAnswer, ClientError> {
        let request = CreateEventRequest { event_type, auto_reset, ..Default::default() };
        self.0.call::<CreateEvent>(&request, &[], 0).map(|(answer, _)| answer)
    }

    fn set(&self, id: EventId) -> String {
        ok(self.0.call::<SetEvent>(&EventRequest { event_id: id, pad: 0 }, &[], 0))
    }

    fn reset(&self, id: EventId) -> String {
        ok(self.0.call::<ResetEvent>(&EventRequest { event_id: id, pad: 0 }, &[], 0))
    }

    fn destroy(&self, id: EventId) -> String {
        ok(self.0.call::<DestroyEvent>(&EventRequest { event_id: id, pad: 0 }, &[], 0))
    }

    fn wait(&self, ids: &[EventId], wait_for_all: u32, timeout: u32) -> String {
        let list: Vec<WaitEvent> =
            ids.iter().map(|&event_id| WaitEvent { event_id, ..Default::default() }).collect();
        let request = WaitEventsRequest { timeout, wait_for_all };
        let answer = self.0.wait_call::<WaitEvents>(&request, &list, list.len());
        show(answer, |(answer, _)| {
            let result = ["complete", "time-out", "fail"].get(answer.wait_result as usize).copied();
            match answer.errno {
                0 => result.unwrap_or("unknown result").to_string(),
                errno => format!("{} {}", result.unwrap_or("unknown result"), errno_name(errno as i32)),
            }
        })
    }
}

fn events(client: &Client, out: &mut Transcript) {
    let events = Events(client);
    for kind in [0, 3, 99] {
        let answer = events.create(kind, 1);
        let id = answer.as_ref().map(|answer| answer.event_id).ok();
        out.line(
            &format!("event of type {kind}"),
            show(answer, |answer| {
                format!(
                    "id {:#x}, trigger {:#x}, slot {}",
                    answer.event_id.0, answer.trigger_data, answer.slot_index
                )
            }),
        );
        let Some(id) = id else { continue };
        out.line("wait, look", events.wait(&[id], 1, 0));
        out.line("wait, 30 ms", events.wait(&[id], 1, 30));
        out.line("set", events.set(id));
        out.line("wait, 1 s", events.wait(&[id], 1, 1000));
        out.line("wait, look again", events.wait(&[id], 1, 0));
        out.line("set", events.set(id));
        out.line("reset", events.reset(id));
        out.line("wait, look after reset", events.wait(&[id], 1, 0));
        out.line("destroy", events.destroy(id));
        out.line("destroy again", events.destroy(id));
        out.line("wait on the destroyed", events.wait(&[id], 1, 0));
        out.line("set the destroyed", events.set(id));
    }
    let ids: Vec<EventId> =
        (0..4).filter_map(|_| events.create(0, 1).ok().map(|answer| answer.event_id)).collect();
    let [a, b, c, _] = ids.as_slice() else { return out.line("four events", "not made") };
    out.line("any of four", events.wait(&ids, 0, 20));
    out.line("set three", format!("{:?}", [events.set(*a), events.set(*b), events.set(*c)]));
    out.line("all of four, 100 ms", events.wait(&ids, 1, 100));
    out.line("one that was set", events.wait(&[*a], 1, 0));
    out.line("nothing", events.wait(&[], 1, 0));
    out.line("a known and an unknown one", events.wait(&[*a, EventId(999)], 0, 0));

    let pause = || std::thread::sleep(Duration::from_millis(100));
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| events.wait(&[*a], 1, u32::MAX));
        pause();
        // The control ring goes on while a wait blocks.
        out.line("clocks meanwhile", ok(client.call::<GetClockCounters>(&GpuRequest::default(), &[], 0)));
        out.line("set under a sleeper", events.set(*a));
        out.line("the sleeper", sleeper.join().unwrap_or_else(|_| "panicked".into()));
    });
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| events.wait(&ids, 1, u32::MAX));
        pause();
        out.line("destroy one of four under a sleeper", events.destroy(*b));
        out.line("the sleeper", sleeper.join().unwrap_or_else(|_| "panicked".into()));
    });
    for id in [*a, *c] {
        out.line("destroy", events.destroy(id));
    }
}
