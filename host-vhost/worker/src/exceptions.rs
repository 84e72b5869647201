//! Exceptions of queues: from KFD, which looks for the head of a queue's context save area in this process, to the guest
//! process, whose own head says where it wants to hear of them.
//!
//! With a runtime enabled the kernel reads that head at the queue's address of the save area, a number of the guest's, and writes
//! where it points to (`send_exception_work_handler`, kfd_process.c). So from then on this process has a page of its own at
//! that address before there is a queue ([`kfd_host::ExceptionPage`]), or there is no queue. Where this process has other things is
//! bounded ([`AREAS`]), so that a guest neither hits them nor learns from a refusal where they are.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use kfd_abi::event::{EventData, KFD_IOC_EVENT_SIGNAL, KFD_IOC_WAIT_RESULT_FAIL};
use kfd_abi::queue::ContextSaveAreaHeader;
use kfd_host::ExceptionPage;
use nix::errno::Errno;
use virtio_kfd_protocol::CreateQueueRequest;

use crate::blob::PAGE;
use crate::context::{Context, EventPage};
use crate::failure::Failure;
use crate::memory::Memory;
use crate::queue::{Queue, Queues};

/// Addresses at which a save area may begin when a runtime is enabled. Between them are this process's mappings, by the
/// supervisor's choice of a stack limit (`WORKER_STACK_LIMIT` of the daemon), and its program and heap
/// (`ELF_ET_DYN_BASE` of Linux: 0x5555_5555_4000, and up to 32 random bits of pages). Programs of a guest have their mappings below
/// their own stack, or from a third of all addresses on upwards. Those without random addresses (under a debugger, `setarch -R`) have
/// them below 0x7fff_f800_0000, where this process has its stack and the kernel's pages, somewhere in the last 16 GiB
/// (`stack_maxrandom_size`): a guest could find that out, so that it is the end of the context ([`Exceptions::page`]).
const AREAS: [Range<u64>; 2] = [1 << 16..0x3c00_0000_0000, 0x6600_0000_0000..0x7fff_f800_0000];

/// Stack of the thread in bytes.
const STACK_BYTES: usize = 128 * 1024;

/// How often the thread looks as long as there is no event to wait for: a runtime without interrupts never makes one.
const LOOK: Duration = Duration::from_millis(20);
/// The same while no queue has a page.
const IDLE: Duration = Duration::from_millis(200);

/// What a context knows of exceptions, beside its queues' pages.
#[derive(Debug, Default)]
pub struct Exceptions {
    /// A runtime was enabled once. For good: the kernel looks at that before it looks for the queue.
    pub possible: bool,
    /// The operator wants none: no runtime is enabled.
    pub refused: bool,
    /// The event on which the thread waits.
    event: Option<u32>,
    /// A thread looks from time to time, until there is an event.
    looks: bool,
}

impl Exceptions {
    /// The page for a new queue. `None` where the kernel does not look for one. Ends the process where it has something else at that
    /// place itself: the next one has it elsewhere, so that no guest finds out by trying what is where.
    pub fn page(&self, request: &CreateQueueRequest) -> Result<Option<ExceptionPage>, Failure> {
        let area = request.context_save_va.0;
        // At address 0 the kernel finds nothing.
        if !self.possible || area == 0 {
            return Ok(None);
        }
        if !area.is_multiple_of(PAGE) || !AREAS.iter().any(|areas| areas.contains(&area)) {
            let reason = format!("CreateQueue: with a runtime enabled no context save area is at {area:#x}");
            return Err(Failure::invalid(reason));
        }
        let page = ExceptionPage::new(area).map_err(|error| {
            if error.errno == Errno::EEXIST {
                tracing::warn!(
                    "a guest asked for a context save area where this worker has something, so it ends"
                );
                std::process::exit(1);
            }
            Failure::limit(format!("CreateQueue: {error}"))
        })?;
        page.set_event(self.event.unwrap_or(0));
        Ok(Some(page))
    }

    /// Whether the thread is to be started as soon as events have their page.
    pub fn wait_for_events(&self) -> bool {
        self.possible && self.event.is_none()
    }
}

/// Starts the thread, if there is none. It waits as soon as events have their page: the first event decides which that is, so that it
/// has to be the guest's. Before that it looks.
pub fn start(context: &Context, queues: &mut Queues) {
    if !queues.exceptions.wait_for_events() {
        return;
    }
    if context.events().page == EventPage::None {
        return look(context, queues);
    }
    match begin(context) {
        Ok(event) => {
            queues.exceptions.event = Some(event);
            queues
                .live()
                .filter_map(|queue| queue.exceptions.as_ref())
                .for_each(|page| page.set_event(event));
        }
        Err(reason) => {
            // There may be no event left.
            no_thread(context, &reason);
            look(context, queues);
        }
    }
}

/// Starts the thread that looks, if there is none.
fn look(context: &Context, queues: &mut Queues) {
    if !queues.exceptions.looks {
        match begin_looking(context) {
            Ok(()) => queues.exceptions.looks = true,
            Err(reason) => no_thread(context, &reason),
        }
    }
}

fn no_thread(context: &Context, reason: &str) {
    context.throttle.log(|held| {
        tracing::warn!("no exceptions of queues: {reason} ({held} messages before were held back)");
    });
}

/// Makes the thread that looks.
fn begin_looking(context: &Context) -> Result<(), String> {
    let shared = context.shared().ok_or("the context ends")?;
    let thread = thread::Builder::new().name("exceptions".into()).stack_size(STACK_BYTES);
    let look = move || {
        // The one that waits passes on what is left.
        loop {
            let pause = {
                let queues = shared.queues();
                match queues.exceptions.event {
                    Some(_) => return,
                    None if queues.live().any(|queue| queue.exceptions.is_some()) => LOOK,
                    None => IDLE,
                }
            };
            pass_on(&shared);
            thread::park_timeout(pause);
        }
    };
    thread.spawn(look).map(drop).map_err(|error| error.to_string())
}

/// Makes the event and the thread.
fn begin(context: &Context) -> Result<u32, String> {
    let shared = context.shared().ok_or("the context ends")?;
    let mut events = context.events();
    let made =
        context.kfd.create_event(KFD_IOC_EVENT_SIGNAL, true, 0, None).map_err(|error| error.to_string())?;
    let event = made.event_id;
    let thread = thread::Builder::new().name("exceptions".into()).stack_size(STACK_BYTES);
    match thread.spawn(move || wait(&shared, event)) {
        Ok(_) => {
            events.own = Some(event);
            Ok(event)
        }
        Err(error) => {
            if let Err(error) = context.kfd.destroy_event(event) {
                tracing::error!("an event that is not used stays: {error}");
            }
            Err(error.to_string())
        }
    }
}

/// The thread, to the end of the process.
fn wait(context: &Context, event: u32) {
    loop {
        // First what came before there was an event: whoever starts this thread has the queues until their pages name it.
        pass_on(context);
        let mut data = [EventData { event_id: event, ..Default::default() }];
        let outcome = context.kfd.wait_events(&mut data, false, u32::MAX);
        if outcome.errno.is_some() || outcome.result == KFD_IOC_WAIT_RESULT_FAIL {
            tracing::error!("exceptions of queues are not passed on any more: {outcome:?}");
            return;
        }
    }
}

/// Tells the guest process of all exceptions that there are, as the kernel does: first the word, then the event.
fn pass_on(context: &Context) {
    let mut told = Vec::new();
    {
        // Held so that neither a queue nor memory goes meanwhile.
        let memory = context.memory();
        let queues = context.queues();
        for queue in queues.live() {
            let reasons = queue.exceptions.as_ref().map_or(0, ExceptionPage::take);
            if reasons != 0 {
                told.push(tell(&memory, queue, reasons));
            }
        }
    }
    for outcome in told {
        let set = outcome.and_then(|event| {
            let id = context.events().guests(event);
            Ok(context.kfd.set_event(id)?)
        });
        if let Err(failure) = set {
            context.throttle.log(|held| {
                tracing::debug!("an exception of a queue: {failure} ({held} messages before were held back)");
            });
        }
    }
}

/// Adds exceptions to the word that the head of a queue's save area in the guest's memory names. Returns the event that it names, which
/// the kernel sets even where there is no such word.
fn tell(memory: &Memory, queue: &Queue, reasons: u64) -> Result<u32, Failure> {
    let [.., area] = queue.addresses;
    let head = |offset: usize| {
        let at = area
            .checked_add(offset as u64)
            .ok_or_else(|| Failure::invalid("the save area's head overflows"))?;
        let word = memory.guest_word(queue.gpu_id, at)?;
        let word = word.and_then(|place| place.words.load(place.first));
        word.ok_or_else(|| {
            Failure::invalid(format!("the save area at {area:#x} is not in the guest's memory"))
        })
    };
    let payload = head(std::mem::offset_of!(ContextSaveAreaHeader, err_payload_addr))?;
    let [event, _] = halves(head(std::mem::offset_of!(ContextSaveAreaHeader, err_event_id))?);
    if let Some(place) = memory.guest_word(queue.gpu_id, payload)? {
        place.words.set_bits(place.first, reasons);
    }
    Ok(event)
}

/// The two 32-bit words of a 64-bit one, the first in memory first.
fn halves(word: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

#[cfg(test)]
mod tests {
    use virtio_kfd_protocol::{GuestVa, Status};

    use super::*;

    #[test]
    fn areas_are_where_this_process_has_nothing() {
        let exceptions = Exceptions { possible: true, ..Default::default() };
        let page = |va| {
            let request = CreateQueueRequest { context_save_va: GuestVa(va), ..Default::default() };
            exceptions.page(&request).map_err(|failure| failure.status)
        };
        assert!(page(0x2_3456_7000).unwrap().is_some());
        assert!(page(0).unwrap().is_none());
        // Not a page's, a worker's mappings, a program's, stacks', the kernel's.
        for va in [
            0x2_3456_7001,
            0x3c00_0000_0000,
            0x53ff_0000_0000,
            0x5555_5555_4000,
            0x7fff_f800_0000,
            1 << 63,
            4096,
        ] {
            assert_eq!(page(va).unwrap_err(), Status::INVALID, "{va:#x}");
        }
        let before = Exceptions::default();
        let anywhere = CreateQueueRequest { context_save_va: GuestVa(7), ..Default::default() };
        assert!(before.page(&anywhere).unwrap().is_none());
    }
}
