//! The pump's thread over plain files, which stand for guest memory and for the page of doorbells.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use kfd_host::SharedWords;
use kfd_host::mapping::Piece;

use super::bells::IDLE;
use super::*;

const GPU: u32 = 26287;
/// Enough for a loaded machine; a pump that works needs some microseconds.
const PATIENCE: Duration = Duration::from_secs(20);

fn memory() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    file
}

fn words(file: &File) -> SharedWords {
    SharedWords::new(&[Piece { file: file.as_fd(), offset: 0, len: 8192 }]).unwrap()
}

fn shadow(file: &File, resource: u32) -> GuestWords {
    GuestWords { words: words(file), first: 0, resource, regions: BTreeSet::from([resource]) }
}

/// A pump that runs with a live queue at doorbell 3, the guest's memory and the real doorbells.
fn pump() -> (Pump, SharedWords, SharedWords) {
    let (guest, device) = (memory(), memory());
    let pump = Pump::new();
    pump.set_shadow(GPU, shadow(&guest, 1));
    pump.change(|doorbells| {
        doorbells.set_real(GPU, words(&device));
        doorbells.add(GPU, 3, None);
    });
    pump.start().unwrap();
    (pump, words(&guest), words(&device))
}

/// Waits until the doorbell has rung with the value.
fn await_value(device: &SharedWords, index: u64, value: u64) {
    let begin = Instant::now();
    while device.load(index) != Some(value) {
        assert!(begin.elapsed() < PATIENCE, "{value} has not come, {:x?} is there", device.load(index));
        thread::yield_now();
    }
}

#[test]
fn rings_of_live_queues_come_through_and_others_do_not() {
    let (pump, guest, device) = pump();
    // 0 is the first packet of an AQL queue.
    guest.store(3, 0);
    await_value(&device, 3, 0);
    guest.store(4, 77);
    for value in 1..1000 {
        guest.store(3, value);
        if value % 100 == 0 {
            await_value(&device, 3, value);
        }
    }
    await_value(&device, 3, 999);
    assert_eq!(device.load(4), Some(0), "no queue is there");
    pump.change(|doorbells| doorbells.remove(GPU, 3));
    guest.store(3, 1000);
    guest.store(4, 78);
    pump.change(|doorbells| doorbells.add(GPU, 4, None));
    guest.store(4, 5);
    await_value(&device, 4, 5);
    assert_eq!(device.load(3), Some(999), "the queue is gone");
}

#[test]
fn what_an_earlier_queue_has_left_is_no_ring() {
    let (pump, guest, device) = pump();
    guest.store(3, 41);
    await_value(&device, 3, 41);
    pump.change(|doorbells| doorbells.remove(GPU, 3));
    guest.store(3, 42);
    pump.change(|doorbells| doorbells.add(GPU, 3, None));
    assert_eq!(guest.load(3), Some(IDLE));
    // A look at all of them is over when another queue's ring has come through twice.
    pump.change(|doorbells| doorbells.add(GPU, 5, None));
    for value in 1..3 {
        guest.store(5, value);
        await_value(&device, 5, value);
    }
    assert_eq!(device.load(3), Some(41));
    // The same value is a ring of the new queue's all the same.
    device.store(3, IDLE);
    guest.store(3, 41);
    await_value(&device, 3, 41);
}

#[test]
fn a_guest_that_has_armed_is_heard_when_it_calls() {
    let (pump, guest, device) = pump();
    for round in 0..100 {
        guest.store(3, 2 * round);
        pump.arm();
        // The last look.
        await_value(&device, 3, 2 * round);
        pump.ring();
        guest.store(3, 2 * round + 1);
        await_value(&device, 3, 2 * round + 1);
    }
}

#[test]
fn a_new_shadow_is_looked_at_though_the_guest_had_armed() {
    let (pump, guest, device) = pump();
    pump.arm();
    pump.fence(|shadow| shadow.resource == 1);
    guest.store(3, 5);
    let other = memory();
    other.write_all_at(&9u64.to_ne_bytes(), 24).unwrap();
    pump.set_shadow(GPU, shadow(&other, 2));
    let other = words(&other);
    assert_eq!(other.load(3), Some(IDLE));
    other.store(3, 6);
    await_value(&device, 3, 6);
}

#[test]
fn a_shadow_that_is_fenced_off_is_unmapped_and_may_vanish() {
    let (pump, _, device) = pump();
    let guest = memory();
    pump.fence(|shadow| shadow.regions.contains(&1));
    pump.set_shadow(GPU, shadow(&guest, 2));
    let ours = words(&guest);
    ours.store(3, 5);
    await_value(&device, 3, 5);
    drop(ours);
    pump.fence(|shadow| shadow.resource == 2);
    // A look at it from here on would end this process with SIGBUS.
    guest.set_len(0).unwrap();
    pump.ring();
    pump.change(|doorbells| doorbells.add(GPU, 6, None));
    thread::sleep(Duration::from_millis(5));
    assert!(!pump.look_up(|doorbells| doorbells.has_shadow(GPU)));
    assert_eq!(device.load(6), Some(0));
}

#[test]
fn doorbells_are_still_some_time_after_the_last_ring() {
    let (pump, guest, device) = pump();
    guest.store(3, 1);
    await_value(&device, 3, 1);
    let begin = Instant::now();
    assert!(pump.wait_still(PATIENCE));
    // What rang before `begin` rang at most as long before it as the wait was short.
    assert!(pump.shared.pace().rang.elapsed() >= STILL);
    assert!(begin.elapsed() < PATIENCE);
    pump.ring();
    assert!(!pump.wait_still(Duration::from_millis(1)));
}

/// While a pump polls as closely as it can, others get its lock.
#[test]
fn a_busy_pump_lets_calls_through() {
    let (pump, guest, _device) = pump();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0;
            while !stop.load(Ordering::Relaxed) {
                value += 1;
                guest.store(3, value);
            }
        });
        for _ in 0..1000 {
            assert!(pump.look_up(|doorbells| doorbells.has_shadow(GPU)));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// HSA Platform System Architecture Specification, "Multi vs. single submitting agents": threads that submit to one queue ring
/// on their own, so that the doorbell's values come in any order.
#[test]
fn the_latest_packet_of_an_aql_queue_is_passed_on_though_an_earlier_one_rang_last() {
    let (pump, guest, device) = pump();
    let queue = memory();
    let index = words(&queue);
    // The write index lies somewhere in a page.
    let place = GuestWords { first: 7, ..shadow(&queue, 9) };
    pump.change(|doorbells| doorbells.add(GPU, 6, Some((place, 64))));
    for (written, rung, passed_on) in [
        // Packet 5 rang before packet 4.
        (6, 4, 5),
        (7, 6, 6),
        // A full ring.
        (70, 7, 69),
        // No index at all: what rang.
        (0, 8, 8),
        (9, 20, 20),
        (1 << 40, 21, 21),
    ] {
        index.store(7, written);
        guest.store(6, rung);
        await_value(&device, 6, passed_on);
    }
    // A larger ring has room for more packets between the two.
    pump.change(|doorbells| doorbells.resize(GPU, 6, 256));
    index.store(7, 300);
    guest.store(6, 100);
    await_value(&device, 6, 299);
    // Its memory goes; the queue rings on.
    pump.fence(|words| words.resource == 9);
    queue.set_len(0).unwrap();
    guest.store(6, 30);
    await_value(&device, 6, 30);
}
