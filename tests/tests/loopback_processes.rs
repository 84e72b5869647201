//! Guest processes of one VM, in loop-back: each has a worker of its own, which ends with it.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use guest_thunk::client::Client;
use guest_thunk::transport::loopback::LoopbackVm;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::{
    CreateEventRequest, EventId, EventRequest, GpuRequest, WaitEvent, WaitEventsRequest,
};
use virtio_kfd_tests::native::{LOOPBACK_VARIABLE, text};
use virtio_kfd_tests::{Artifacts, Daemon, Keeper, need};

/// What the end of a guest process takes at the most where the machine has nothing else to do.
const SECOND: Duration = Duration::from_secs(1);

/// The same where others want the CPUs as well.
const SOON: Duration = Duration::from_secs(30);

fn client(vm: &LoopbackVm) -> Client {
    Client::over(Box::new(vm.context().unwrap())).unwrap()
}

fn create(client: &Client) -> EventId {
    let request = CreateEventRequest { auto_reset: 1, ..Default::default() };
    client.call::<CreateEvent>(&request, &[], 0).unwrap().0.event_id
}

fn set(client: &Client, event_id: EventId) -> bool {
    client.call::<SetEvent>(&EventRequest { event_id, pad: 0 }, &[], 0).is_ok()
}

/// Whether the event is set.
fn look(client: &Client, event_id: EventId) -> bool {
    let list = [WaitEvent { event_id, ..Default::default() }];
    let request = WaitEventsRequest { timeout: 0, wait_for_all: 1 };
    client.wait_call::<WaitEvents>(&request, &list, 1).unwrap().0.wait_result == 0
}

fn works(client: &Client) -> bool {
    client.call::<GetClockCounters>(&GpuRequest::default(), &[], 0).is_ok()
}

fn daemon(artifacts: &Artifacts) -> Daemon {
    Daemon::start(artifacts, "model:gfx906", &[]).unwrap()
}

/// Whether a process that has ended is also reaped.
fn gone(pid: u32) -> bool {
    let begin = Instant::now();
    while Path::new(&format!("/proc/{pid}")).exists() {
        if begin.elapsed() > SOON {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

#[test]
fn each_guest_process_has_its_own_worker_and_events() {
    let artifacts = need!(Artifacts::for_daemon(&[], &[]));
    let daemon = daemon(&artifacts);
    let vm = LoopbackVm::connect(daemon.socket()).unwrap();
    let a = client(&vm);
    daemon.wait_for_workers(1, SOON).unwrap();
    let of_a = daemon.workers();
    let b = client(&vm);
    daemon.wait_for_workers(2, SOON).unwrap();
    let of_b: BTreeSet<u32> = daemon.workers().difference(&of_a).copied().collect();
    assert_eq!((of_a.len(), of_b.len()), (1, 1));

    // Both KFD processes give out the same first id; setting it in one does nothing in the other.
    let (in_a, in_b) = (create(&a), create(&b));
    assert_eq!(in_a, in_b);
    assert!(set(&a, in_a));
    assert!(!look(&b, in_b), "an event crossed over");
    assert!(look(&a, in_a));
    let more = create(&a);
    assert!(!set(&b, more), "an event of another process can be set");

    // The end of one.
    let worker = *of_a.first().unwrap();
    let begin = Instant::now();
    drop(a);
    daemon.wait_for_workers(1, SOON).unwrap();
    assert!(gone(worker), "not even a zombie is left");
    println!("a guest process's worker was gone after {:?}", begin.elapsed());
    assert_eq!(daemon.workers(), of_b);
    assert!(works(&b) && set(&b, in_b) && look(&b, in_b));
}

#[test]
fn a_worker_that_is_killed_takes_one_guest_process_with_it() {
    let artifacts = need!(Artifacts::for_daemon(&[], &[]));
    let daemon = daemon(&artifacts);
    let vm = LoopbackVm::connect(daemon.socket()).unwrap();
    let a = client(&vm);
    daemon.wait_for_workers(1, SOON).unwrap();
    let worker = *daemon.workers().first().unwrap();
    let b = client(&vm);
    let event = create(&a);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let list = [WaitEvent { event_id: event, ..Default::default() }];
            let request = WaitEventsRequest { timeout: u32::MAX, wait_for_all: 1 };
            a.wait_call::<WaitEvents>(&request, &list, 1).map(|(answer, _)| answer.wait_result)
        });
        std::thread::sleep(Duration::from_millis(200));
        let pid = rustix::process::Pid::from_raw(i32::try_from(worker).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        // The sleeper gets an error, and at once.
        assert!(sleeper.join().unwrap().is_err());
    });
    assert!(!works(&a) && a.is_lost());
    assert!(works(&b));
    let c = client(&vm);
    assert!(works(&c));
}

/// 500 guest processes one after the other in one VM, with blobs, buffers and events that they do not give back.
#[test]
fn five_hundred_rounds_leave_nothing_behind() {
    let artifacts = need!(Artifacts::for_daemon(&["kfd-hostile"], &[]));
    let hostile = artifacts.program("kfd-hostile").unwrap();
    let daemon = daemon(&artifacts);
    let rounds = |count: &str| {
        let mut command = Command::new(&hostile);
        command.args(["rounds", count]).env(LOOPBACK_VARIABLE, daemon.socket());
        // Stays connected until told, so that what the VM's device holds can be looked at.
        command.env("KFD_HOSTILE_LINGER", "1");
        command
    };
    let linger = |count: &str, number: u32| {
        let log = daemon.directory().join(format!("rounds-{number}"));
        let keeper = Keeper::start(rounds(count), &log, Duration::from_secs(300)).unwrap();
        let begin = Instant::now();
        while !keeper.output().contains("rounds: ") {
            assert!(
                keeper.is_running() && begin.elapsed() < Duration::from_secs(300),
                "{}\n{}",
                keeper.report(),
                daemon.report()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        (daemon.settled(SOON).unwrap(), keeper)
    };
    let (few, keeper) = linger("20", 1);
    drop(keeper);
    let (many, keeper) = linger("500", 2);
    println!("after 20 rounds {few:?}, after 500 {many:?}");
    assert_eq!(many.descriptors, few.descriptors);
    assert_eq!(many.processes, few.processes);
    // Threads of a pool and malloc's arenas come and go; a blob a round would be hundreds.
    assert!(many.mappings <= few.mappings + 40, "{few:?}, {many:?}");
    assert!(many.private_kib <= few.private_kib + 8 * 1024, "{few:?}, {many:?}");
    drop(keeper);
}

/// Case C68a: a VMM that is killed in mid-command, 50 times; each time all is given back and the next one is served.
#[test]
fn a_vmm_that_is_killed_is_followed_by_the_next() {
    let artifacts = need!(Artifacts::for_daemon(&["kfd-hostile"], &[]));
    let hostile = artifacts.program("kfd-hostile").unwrap();
    let daemon = daemon(&artifacts);
    let (mut first, mut shortest) = (None, SOON);
    for round in 0..50 {
        let mut command = Command::new(&hostile);
        command.arg("hold").env(LOOPBACK_VARIABLE, daemon.socket());
        let log = daemon.directory().join("hold");
        let keeper = Keeper::start(command, &log, Duration::from_secs(60)).unwrap();
        let begin = Instant::now();
        // Some are killed while they connect, some in the middle of a wait.
        while round % 3 != 0 && !keeper.output().contains("ready") {
            assert!(
                keeper.is_running() && begin.elapsed() < SOON,
                "round {round}: {}\n{}",
                keeper.report(),
                daemon.report()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(round % 7));
        drop(keeper);
        // Dropping has reaped the VMM.
        let took = daemon.wait_for_workers(0, SOON);
        shortest = shortest.min(took.unwrap_or_else(|error| panic!("round {round}: {error:#}")));
        if round == 5 {
            first = Some(daemon.settled(SOON).unwrap());
        }
    }
    println!("the workers of a VMM were gone after {shortest:?} at best");
    assert!(shortest < SECOND, "{shortest:?}");
    let (first, last) = (first.unwrap(), daemon.settled(SOON).unwrap());
    assert_eq!((first.descriptors, first.processes), (last.descriptors, last.processes));
    let mut command = Command::new(&hostile);
    command.args(["rounds", "1"]).env(LOOPBACK_VARIABLE, daemon.socket());
    assert_eq!(text(command, SOON).unwrap(), "rounds: 1\n");
}
