//! Events: ids, slots, auto reset, ages, time-outs, destruction under a waiter, exhaustion.

use std::time::Duration;

use kfd_abi::event::*;
use kfd_abi::kfd::request;
use kfd_abi::memory::FreeMemoryOfGpuArgs;
use zerocopy::FromZeros;

use super::Kfd;
use crate::transcript::Transcript;

const SIGNAL: u32 = 0;

fn create(kfd: &Kfd, kind: u32, auto_reset: u32) -> Result<CreateEventArgs, i32> {
    let mut args = CreateEventArgs::new_zeroed();
    args.event_type = kind;
    args.auto_reset = auto_reset;
    kfd.ioctl(request::CREATE_EVENT, &mut args).map(|()| args)
}

fn by_id(kfd: &Kfd, number: u32, id: u32) -> Result<(), i32> {
    let mut args = SetEventArgs::new_zeroed();
    args.event_id = id;
    kfd.ioctl(number, &mut args)
}

fn set(kfd: &Kfd, id: u32) -> Result<(), i32> {
    by_id(kfd, request::SET_EVENT, id)
}

fn destroy(kfd: &Kfd, id: u32) -> Result<(), i32> {
    by_id(kfd, request::DESTROY_EVENT, id)
}

/// Waits; answers the result and the ages.
fn wait(kfd: &Kfd, events: &[(u32, u64)], all: u32, timeout: u32) -> Result<(u32, Vec<u64>), i32> {
    let mut list: Vec<EventData> = events
        .iter()
        .map(|&(id, age)| {
            let mut data = EventData::new_zeroed();
            data.event_id = id;
            data.data = [age, 0, 0, 0];
            data
        })
        .collect();
    let mut args = WaitEventsArgs::new_zeroed();
    args.events_ptr = list.as_mut_ptr() as u64;
    args.num_events = list.len() as u32;
    args.wait_for_all = all;
    args.timeout = timeout;
    kfd.ioctl(request::WAIT_EVENTS, &mut args)?;
    Ok((args.wait_result, list.iter().map(|data| data.data.first().copied().unwrap_or(0)).collect()))
}

fn show(answer: Result<(u32, Vec<u64>), i32>) -> Result<String, i32> {
    answer.map(|(result, ages)| {
        let result =
            ["complete", "time-out", "fail"].get(result as usize).copied().unwrap_or("unknown result");
        format!("{result}, ages {ages:?}")
    })
}

pub fn ask(kfd: &Kfd, out: &mut Transcript) {
    creation(kfd, out);
    waiting(kfd, out);
    several(kfd, out);
    ages(kfd, out);
    bad_waits(kfd, out);
    other_types(kfd, out);
    threads(kfd, out);
    exhaustion(kfd, out);
}

fn creation(kfd: &Kfd, out: &mut Transcript) {
    for number in [1, 2] {
        let answer = create(kfd, SIGNAL, 1);
        out.result(
            &format!("signal event {number}"),
            answer.map(|args| {
                format!(
                    "id {}, slot {}, trigger {}, page at {:#x}",
                    args.event_id, args.event_slot_index, args.event_trigger_data, args.event_page_offset
                )
            }),
        );
    }
    let page = KfdPage::map(kfd, EVENT_PAGE_SIZE as usize);
    out.result("event page", page.as_ref().map(|page| page.describe(8)).map_err(|&errno| errno));
    let short = KfdPage::map(kfd, 4096);
    out.result("event page of 4096 bytes", short.map(|page| page.describe(2)));
    let long = KfdPage::map(kfd, EVENT_PAGE_SIZE as usize * 2);
    out.result("event page of twice its size", long.map(|page| page.describe(2)));
    let mut args = CreateEventArgs::new_zeroed();
    args.event_page_offset = 0x4d2_0000_0001;
    let answer = kfd.ioctl(request::CREATE_EVENT, &mut args);
    out.result("signal event with a page that is no buffer", answer.map(|()| args.event_id));
    let mut args = FreeMemoryOfGpuArgs::new_zeroed();
    args.handle = 1;
    out.done("FREE_MEMORY_OF_GPU of handle 1", kfd.ioctl(request::FREE_MEMORY_OF_GPU, &mut args));
    for id in [1, 2] {
        out.done(&format!("destroy {id}"), destroy(kfd, id));
    }
    out.done("destroy 1 again", destroy(kfd, 1));
    for id in [0, 3, 4000, 4095, 4096, 0x4000_0000, u32::MAX] {
        out.done(&format!("set unknown {id}"), set(kfd, id));
        out.done(&format!("reset unknown {id}"), by_id(kfd, request::RESET_EVENT, id));
        out.done(&format!("destroy unknown {id}"), destroy(kfd, id));
    }
    let reused = create(kfd, SIGNAL, 0);
    out.result("the next event's id", reused.map(|args| args.event_id));
    if let Ok(args) = reused {
        out.result("it is not signalled", show(wait(kfd, &[(args.event_id, 0)], 1, 0)));
        out.done("destroy it", destroy(kfd, args.event_id));
    }
}

/// A mapping of the event page; it stays.
struct KfdPage {
    start: *mut u64,
}

impl KfdPage {
    fn map(kfd: &Kfd, length: usize) -> Result<KfdPage, i32> {
        let offset = kfd_abi::mmap::KFD_MMAP_TYPE_EVENTS;
        Ok(KfdPage { start: kfd.mmap(length, offset)? })
    }

    fn describe(&self, slots: usize) -> String {
        let mut words = Vec::new();
        for slot in 0..slots {
            let place = self.start.wrapping_add(slot);
            // SAFETY: the mapping has at least one page (512 slots) and is never unmapped.
            let word = unsafe { place.read_volatile() };
            words.push(format!("{word:x}"));
        }
        format!("slots {}", words.join(" "))
    }
}

fn waiting(kfd: &Kfd, out: &mut Transcript) {
    for (name, auto_reset) in [("auto-reset", 1), ("manual", 0)] {
        let Ok(event) = create(kfd, SIGNAL, auto_reset) else { return out.line(name, "no event") };
        let id = event.event_id;
        let mut ask = |question: &str, timeout| {
            out.result(&format!("{name} event, {question}"), show(wait(kfd, &[(id, 0)], 1, timeout)));
        };
        ask("unset, look", 0);
        ask("unset, 30 ms", 30);
        let first = set(kfd, id);
        ask("set, look", 0);
        ask("looked at again", 0);
        let second = (set(kfd, id), set(kfd, id));
        ask("set twice, 1 s", 1000);
        ask("looked at again", 0);
        let third = (set(kfd, id), by_id(kfd, request::RESET_EVENT, id));
        ask("set and reset", 0);
        out.line(&format!("{name} event, sets and reset"), format!("{first:?} {second:?} {third:?}"));
        out.done(&format!("{name} event, destroy"), destroy(kfd, id));
        out.result(&format!("{name} event, wait on the destroyed"), show(wait(kfd, &[(id, 0)], 1, 0)));
    }
}

fn several(kfd: &Kfd, out: &mut Transcript) {
    let ids: Vec<u32> =
        (0..4).filter_map(|_| create(kfd, SIGNAL, 1).ok().map(|args| args.event_id)).collect();
    let list: Vec<(u32, u64)> = ids.iter().map(|&id| (id, 0)).collect();
    let [a, b, c, _] = ids.as_slice() else { return out.line("four events", "not made") };
    out.result("any of four, none set", show(wait(kfd, &list, 0, 0)));
    out.done("set one", set(kfd, *b));
    out.result("any of four, one set", show(wait(kfd, &list, 0, 1000)));
    out.result("any of four again", show(wait(kfd, &list, 0, 0)));
    // Case C29: the three that were set are consumed by the wait that timed out.
    out.line("set three", format!("{:?}", [*a, *b, *c].map(|id| set(kfd, id))));
    out.result("all of four, three set, 100 ms", show(wait(kfd, &list, 1, 100)));
    for (place, entry) in list.iter().enumerate() {
        out.result(&format!("number {place} alone afterwards"), show(wait(kfd, &[*entry], 1, 0)));
    }
    out.line("set all", format!("{:?}", ids.iter().map(|&id| set(kfd, id)).collect::<Vec<_>>()));
    out.result("all of four", show(wait(kfd, &list, 1, 1000)));
    out.done("set one", set(kfd, *a));
    out.result("the same event twice, any", show(wait(kfd, &[(*a, 0), (*a, 0)], 0, 0)));
    out.done("set one", set(kfd, *a));
    out.result("the same event twice, all", show(wait(kfd, &[(*a, 0), (*a, 0)], 1, 20)));
    out.result("a known and an unknown one, any", show(wait(kfd, &[(*a, 0), (999, 0)], 0, 0)));
    out.done("set one", set(kfd, *a));
    out.result("a set and an unknown one, any", show(wait(kfd, &[(*a, 0), (999, 0)], 0, 0)));
    out.result("the set one alone afterwards", show(wait(kfd, &[(*a, 0)], 1, 0)));
    for id in ids {
        out.done("destroy", destroy(kfd, id));
    }
}

fn ages(kfd: &Kfd, out: &mut Transcript) {
    for (name, auto_reset) in [("auto-reset", 1), ("manual", 0)] {
        let Ok(event) = create(kfd, SIGNAL, auto_reset) else { return out.line("ages", "no event") };
        let id = event.event_id;
        let mut ask = |question: &str, age| {
            out.result(&format!("{name} event, {question}"), show(wait(kfd, &[(id, age)], 1, 0)));
        };
        ask("age 1 before any set", 1);
        ask("age 7 before any set", 7);
        let sets = (set(kfd, id), set(kfd, id), set(kfd, id));
        ask("age 0 after three sets", 0);
        ask("age 1 after three sets", 1);
        ask("age 2", 2);
        ask("age 4", 4);
        ask("age 5", 5);
        out.line(&format!("{name} event, sets"), format!("{sets:?}"));
        out.done("destroy", destroy(kfd, id));
    }
}

fn bad_waits(kfd: &Kfd, out: &mut Transcript) {
    out.result("wait on nothing, all", show(wait(kfd, &[], 1, 0)));
    out.result("wait on nothing, any", show(wait(kfd, &[], 0, 0)));
    out.result("wait on nothing, any, 20 ms", show(wait(kfd, &[], 0, 20)));
    for (question, pointer, count) in [
        ("wait with a null list", 0u64, 1u32),
        ("wait with a list at a kernel address", u64::MAX - 4095, 1),
        ("wait on 2^32 - 1 events at null", 0, u32::MAX),
        ("wait on 5000 events at null", 0, 5000),
    ] {
        let mut args = WaitEventsArgs::new_zeroed();
        args.events_ptr = pointer;
        args.num_events = count;
        let answer = kfd.ioctl(request::WAIT_EVENTS, &mut args);
        out.result(question, answer.map(|()| args.wait_result));
        out.line(&format!("{question}: the result field"), args.wait_result);
    }
}

fn other_types(kfd: &Kfd, out: &mut Transcript) {
    for kind in 1..=10 {
        let answer = create(kfd, kind, 0);
        let shown = answer.map(|args| {
            format!(
                "id {:#x}, slot {}, trigger {:#x}",
                args.event_id, args.event_slot_index, args.event_trigger_data
            )
        });
        out.result(&format!("event of type {kind}"), shown);
        let Ok(args) = answer else { continue };
        let id = args.event_id;
        out.done(&format!("type {kind}, set"), set(kfd, id));
        out.done(&format!("type {kind}, reset"), by_id(kfd, request::RESET_EVENT, id));
        out.result(&format!("type {kind}, wait"), wait(kfd, &[(id, 0)], 1, 0).map(|(result, _)| result));
        out.done(&format!("type {kind}, destroy"), destroy(kfd, id));
    }
    let answer = create(kfd, u32::MAX, 0);
    out.result("event of type 2^32 - 1", answer.map(|args| args.event_id));
    if let Ok(args) = answer {
        out.done("destroy", destroy(kfd, args.event_id));
    }
}

fn threads(kfd: &Kfd, out: &mut Transcript) {
    let Ok(event) = create(kfd, SIGNAL, 1) else { return out.line("threads", "no event") };
    let id = event.event_id;
    let pause = || std::thread::sleep(Duration::from_millis(100));
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| wait(kfd, &[(id, 0)], 1, 20_000));
        pause();
        out.done("set under a sleeper", set(kfd, id));
        if let Ok(answer) = sleeper.join() {
            out.result("the sleeper", show(answer));
        }
    });
    // An auto-reset event with a sleeper is consumed by it.
    out.result("the event afterwards", show(wait(kfd, &[(id, 0)], 1, 0)));
    std::thread::scope(|scope| {
        let sleepers: Vec<_> = (0..3).map(|_| scope.spawn(|| wait(kfd, &[(id, 0)], 1, 20_000))).collect();
        pause();
        out.done("set under three sleepers", set(kfd, id));
        for sleeper in sleepers {
            if let Ok(answer) = sleeper.join() {
                out.result("one of three sleepers", show(answer));
            }
        }
    });
    // Case C26: destruction wakes the sleeper with a failure.
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| wait(kfd, &[(id, 0)], 1, u32::MAX));
        pause();
        out.done("destroy under a sleeper", destroy(kfd, id));
        if let Ok(answer) = sleeper.join() {
            out.result("the sleeper", show(answer));
        }
    });
    let ids: Vec<u32> =
        (0..3).filter_map(|_| create(kfd, SIGNAL, 0).ok().map(|args| args.event_id)).collect();
    let list: Vec<(u32, u64)> = ids.iter().map(|&id| (id, 0)).collect();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| wait(kfd, &list, 1, u32::MAX));
        pause();
        if let Some(&middle) = ids.get(1) {
            out.done("destroy one of three under a sleeper", destroy(kfd, middle));
        }
        if let Ok(answer) = sleeper.join() {
            out.result("the sleeper", show(answer));
        }
    });
    for &id in [ids.first(), ids.last()].into_iter().flatten() {
        out.done("destroy", destroy(kfd, id));
    }
}

fn exhaustion(kfd: &Kfd, out: &mut Transcript) {
    let mut ids = Vec::new();
    let end = loop {
        match create(kfd, SIGNAL, 1) {
            Ok(args) => ids.push(args.event_id),
            Err(errno) => break errno,
        }
        if ids.len() > 10_000 {
            break 0;
        }
    };
    out.line("signal events until the end", ids.len());
    out.done("the one after the last", if end == 0 { Ok(()) } else { Err(end) });
    out.line("first and last id", format!("{:?} {:?}", ids.first(), ids.last()));
    let memory = create(kfd, 3, 0);
    out.result("a memory event is still possible", memory.map(|args| format!("{:#x}", args.event_id)));
    if let Ok(args) = memory {
        out.done("destroy it", destroy(kfd, args.event_id));
    }
    let failures = ids.iter().filter(|&&id| destroy(kfd, id).is_err()).count();
    out.line("destroys that failed", failures);
    let again = create(kfd, SIGNAL, 1);
    out.result("one more afterwards", again.map(|args| args.event_id));
    if let Ok(args) = again {
        out.done("destroy it", destroy(kfd, args.event_id));
    }
}
