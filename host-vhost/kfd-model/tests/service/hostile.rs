//! Calls that no honest program makes, and many at once.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;

use kfd_abi::event::{EventData, KFD_IOC_EVENT_SIGNAL, SetEventArgs, WaitEventsArgs};
use kfd_abi::ioctl::{Direction, request as ioc};
use kfd_abi::kfd::{nr, request};
use kfd_abi::memory::AllocFlags;
use kfd_seam::{KfdService, UserPtr};

use crate::caller::{Caller, PAGE, pointer, shared};

/// A sequence of numbers that is the same on every run (xorshift64*).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number of the kind that breaks arithmetic, or one that names something.
    fn value(&mut self, known: &[u64]) -> u64 {
        match self.next() % 8 {
            0 => 0,
            1 => u64::MAX - self.next() % 4,
            2 => 1 << (self.next() % 64),
            3 => (1 << (self.next() % 64)) - 1,
            4 => self.next(),
            5 => self.next() % 16,
            _ => known[self.next() as usize % known.len()],
        }
    }
}

/// Every ioctl of both devices with every sort of argument: the answer is a result, never a panic or a hang. Pointers
/// in the arguments lead into one buffer of this test or nowhere, for the model writes where it is told to.
#[test]
fn no_argument_makes_it_panic() {
    let caller = Caller::new("gfx906x2");
    let mut numbers = Numbers(0x906);
    let mut target = vec![0u8; 1 << 16];
    let handle = caller.allocate(caller.gpu(), 0x7000_0000_0000, PAGE, AllocFlags::GTT).unwrap().handle;
    let event = caller.create_event(KFD_IOC_EVENT_SIGNAL, 0).unwrap().event_id;
    let dmabuf = caller.export(handle).unwrap();
    let known = [
        u64::try_from(dmabuf.as_raw_fd()).unwrap(),
        u64::from(caller.gpus[0].id),
        u64::from(caller.gpus[1].id),
        u64::from(caller.gpus[0].id) << 32 | u64::from(caller.gpus[1].id),
        handle,
        u64::from(event),
        0x7000_0000_0000,
        PAGE,
        2 * PAGE,
        0xd600_0002,
        pointer(target.as_mut_slice()).0,
        pointer(target.as_mut_slice()).0,
    ];
    let start = known[known.len() - 1];
    let outside = |value: u64| value < start || value >= start + (1 << 15);
    let (mut good, mut bad) = (0, 0);
    for round in 0..60_000 {
        let number = (numbers.next() % 0x2a) as u8;
        let mut words = [0u64; 16];
        for word in &mut words {
            *word = numbers.value(&known);
            // An address of this process that is not the buffer could be written.
            if outside(*word) && *word > 0x1000_0000 && *word < 1 << 47 && *word != 0x7000_0000_0000 {
                *word = 8;
            }
        }
        if number == nr::WAIT_EVENTS {
            // timeout and wait_result.
            words[2] = 1;
        }
        let size = (numbers.next() % 129) as usize;
        let on_kfd = round % 4 > 0;
        let (file, code) = if on_kfd {
            (caller.kfd, ioc(Direction::ReadWrite, b'K', number, size))
        } else {
            let number = match numbers.next() % 8 {
                0 => 0x45,
                // GEM_CLOSE, PRIME both ways, GEM_CREATE, GEM_MMAP, GEM_METADATA, GEM_VA, GEM_OP.
                1..6 => [0x09, 0x2d, 0x2e, 0x40, 0x41, 0x46, 0x48, 0x50][numbers.next() as usize % 8],
                _ => numbers.next() as u8,
            };
            (caller.gpus[0].file, ioc(Direction::ReadWrite, b'd', number, size))
        };
        match caller.model.ioctl(file, code, UserPtr(std::hint::black_box(&mut words).as_mut_ptr() as u64)) {
            Ok(_) => good += 1,
            Err(_) => bad += 1,
        }
        if round % 16 == 0 {
            let request = shared(numbers.value(&known), numbers.value(&known));
            let _ = caller.model.mmap(caller.kfd, &request);
            let _ = caller.model.mmap(caller.gpus[0].file, &request);
            let mut bytes = [0u8; 64];
            let _ = caller.model.read_gpu(caller.gpu(), numbers.value(&known), &mut bytes);
        }
    }
    assert!(good > 1000 && bad > 1000, "{good} calls went well, {bad} did not");
}

#[test]
fn threads_share_the_process() {
    let caller = Arc::new(Caller::new("gfx906"));
    let event = caller.create_event(KFD_IOC_EVENT_SIGNAL, 0).unwrap().event_id;
    let waiter = {
        let caller = caller.clone();
        thread::spawn(move || {
            let mut events = [EventData { event_id: event, ..Default::default() }];
            let mut wait = WaitEventsArgs {
                events_ptr: pointer(&mut events).0,
                num_events: 1,
                wait_for_all: 1,
                timeout: u32::MAX,
                wait_result: 99,
            };
            caller.call(request::WAIT_EVENTS, &mut wait).map(|_| wait.wait_result)
        })
    };
    let workers: Vec<_> = (0..4u64)
        .map(|worker| {
            let caller = caller.clone();
            thread::spawn(move || {
                let gpu = caller.gpu();
                for round in 0..200u64 {
                    let va = 0x7000_0000_0000 + (worker << 32) + round * 4 * PAGE;
                    let flags = AllocFlags::VRAM | AllocFlags::WRITABLE;
                    let buffer = caller.allocate(gpu, va, 2 * PAGE, flags).unwrap();
                    caller.map(buffer.handle, &[gpu]).0.unwrap();
                    let text = (worker << 32 | round).to_ne_bytes();
                    caller.model.write_gpu(gpu, va + PAGE, &text).unwrap();
                    let mut back = [0u8; 8];
                    caller.model.read_gpu(gpu, va + PAGE, &mut back).unwrap();
                    assert_eq!(back, text);
                    caller.unmap(buffer.handle, &[gpu]).0.unwrap();
                    caller.free(buffer.handle).unwrap();
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
    caller.call(request::SET_EVENT, &mut SetEventArgs { event_id: event, pad: 0 }).unwrap();
    assert_eq!(waiter.join().unwrap(), Ok(0));
}
