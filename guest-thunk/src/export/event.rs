//! Events.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use std::sync::Arc;
use std::time::Duration;

use hsakmt_abi::event::{HsaEvent, HsaEventDescriptor};
use virtio_kfd_protocol::limits::MAX_WAIT_EVENTS;

use super::exports;
use super::pointer::{In, Out};
use crate::thunk::open;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::topology::Snapshot;

/// How long a wait takes at least that the host cannot answer any more, if it may take so long.
const LOST_PAUSE: Duration = Duration::from_millis(100);

/// The event at a pointer.
fn event(pointer: Out<HsaEvent>) -> Outcome<HsaEvent> {
    pointer.read().ok_or_else(|| Refusal::handle("Event is NULL"))
}

/// Waits for the events at these pointers.
fn wait(pointers: &[Out<HsaEvent>], all: bool, milliseconds: u32, ages: Out<u64>) -> Outcome<()> {
    let thunk = open::current()?;
    let events: Outcome<Vec<HsaEvent>> = pointers.iter().map(|pointer| event(*pointer)).collect();
    let before = events?;
    let mut after = before.clone();
    let mut seen = ages.read_all(before.len());
    let snapshot = thunk.current_snapshot();
    let with_ages = (!ages.is_null()).then_some(seen.as_mut_slice());
    let outcome =
        thunk.events.wait(&thunk.client, snapshot.as_deref(), &mut after, with_ages, all, milliseconds);
    if thunk.client.is_lost() {
        // Runtimes ask again at once whatever the answer: their thread must not take a core for a host that is gone.
        let pause = Duration::from_millis(milliseconds.into()).min(LOST_PAUSE);
        std::thread::sleep(pause);
    }
    ages.write_all(&seen);
    for ((pointer, before), after) in pointers.iter().zip(&before).zip(&after) {
        // Only what changed: another thread may use an event that said nothing.
        if before != after {
            pointer.write(*after);
        }
    }
    outcome
}

fn wait_many(
    events: In<Out<HsaEvent>>,
    num_events: u32,
    all: bool,
    milliseconds: u32,
    ages: Out<u64>,
) -> Outcome<()> {
    open::current()?;
    if events.is_null() {
        return Err(Refusal::handle("Events is NULL"));
    }
    let count = usize::try_from(num_events).ok().filter(|count| *count <= MAX_WAIT_EVENTS);
    let too_many =
        || Refusal::error(format!("NumEvents is {num_events}, expected at most {MAX_WAIT_EVENTS}"));
    wait(&events.read_all(count.ok_or_else(too_many)?), all, milliseconds, ages)
}

exports! {
    "event";
    /// Makes an event.
    done
    fn hsaKmtCreateEvent(
        event_desc: In<HsaEventDescriptor>,
        manual_reset: bool,
        is_signaled: bool,
        event: Out<Out<HsaEvent>>,
    ) {
        let thunk = open::current()?;
        let event = event.required("Event")?;
        let descriptor = event_desc.read().ok_or_else(|| Refusal::parameter("EventDesc is NULL"))?;
        let snapshot = match thunk.current_snapshot() {
            Some(snapshot) => snapshot,
            // The application need not have read the topology; whether there is a GPU is asked for it.
            None if thunk.events.are_first() => Arc::new(Snapshot::take(&thunk.client, &thunk.settings)?),
            None => Arc::default(),
        };
        let made = thunk.events.create(thunk.host(&snapshot), descriptor, manual_reset, is_signaled)?;
        let given = Out::give(made);
        thunk.events.own(given.address(), &made);
        event.write(given);
        Ok(())
    }

    /// Destroys an event. Waits for it fail.
    done
    fn hsaKmtDestroyEvent(event: Out<HsaEvent>) {
        let thunk = open::current()?;
        if event.is_null() {
            return Err(Refusal::handle("Event is NULL"));
        }
        thunk.events.destroy(&thunk.client, event.address())?;
        // SAFETY: the address was in the table of events that were given and not taken back, and left it just now.
        unsafe { event.take_back() };
        Ok(())
    }

    /// Sets an event.
    done
    fn hsaKmtSetEvent(event: Out<HsaEvent>) {
        let thunk = open::current()?;
        thunk.events.set(&thunk.client, &self::event(event)?)
    }

    /// Resets an event.
    done
    fn hsaKmtResetEvent(event: Out<HsaEvent>) {
        let thunk = open::current()?;
        thunk.events.reset(&thunk.client, &self::event(event)?)
    }

    /// Succeeds for an event, as AMD's library does: there is no call that tells the state.
    done
    fn hsaKmtQueryEventState(event: Out<HsaEvent>) {
        open::current()?;
        self::event(event).map(|_| ())
    }

    /// Waits for an event.
    done
    fn hsaKmtWaitOnEvent(event: Out<HsaEvent>, milliseconds: u32) {
        self::event(event)?;
        wait(&[event], true, milliseconds, Out::from(std::ptr::null_mut()))
    }

    /// Waits for an event unless its age has changed.
    done
    fn hsaKmtWaitOnEvent_Ext(event: Out<HsaEvent>, milliseconds: u32, event_age: Out<u64>) {
        self::event(event)?;
        wait(&[event], true, milliseconds, event_age)
    }

    /// Waits for any or all of several events.
    done
    fn hsaKmtWaitOnMultipleEvents(
        events: In<Out<HsaEvent>>,
        num_events: u32,
        wait_on_all: bool,
        milliseconds: u32,
    ) {
        wait_many(events, num_events, wait_on_all, milliseconds, Out::from(std::ptr::null_mut()))
    }

    /// Waits for any or all of several events unless an age has changed.
    done
    fn hsaKmtWaitOnMultipleEvents_Ext(
        events: In<Out<HsaEvent>>,
        num_events: u32,
        wait_on_all: bool,
        milliseconds: u32,
        event_age: Out<u64>,
    ) {
        wait_many(events, num_events, wait_on_all, milliseconds, event_age)
    }
}
