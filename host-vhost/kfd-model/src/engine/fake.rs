//! A GPU address space for tests: a few ranges of host memory, and a world that writes down what it is told.
#![allow(unsafe_code, reason = "a word of the fake memory is looked at with both sizes")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::{Access, Context, Dispatcher, EmptyKernels, Failure, Interrupt, Memory, Processor, Step, World};
use crate::space::{Fault, FaultReason};

struct Range {
    start: u64,
    words: Vec<AtomicU64>,
    writable: bool,
}

/// Memory at fixed GPU addresses.
pub struct FakeMemory {
    ranges: Vec<Range>,
}

impl FakeMemory {
    /// One range of zeros. Start and size are multiples of 8.
    pub fn new(start: u64, size: u64) -> Self {
        Self { ranges: Vec::new() }.with(start, size, true)
    }

    /// One range more.
    pub fn with(mut self, start: u64, size: u64, writable: bool) -> Self {
        let words = (0..size / 8).map(|_| AtomicU64::new(0)).collect();
        self.ranges.push(Range { start, words, writable });
        self
    }

    fn find(&self, va: u64, access: Access) -> Result<&AtomicU64, Fault> {
        let name = if access == Access::Read { "read" } else { "write" };
        let fault = |reason| Fault { gpu_id: 1, va, access: name, reason };
        let found = self.ranges.iter().find_map(|range| {
            let word = range.words.get(usize::try_from(va.checked_sub(range.start)? / 8).ok()?)?;
            Some((range, word))
        });
        let (range, word) = found.ok_or(fault(FaultReason::NotPresent))?;
        if access == Access::Write && !range.writable {
            return Err(fault(FaultReason::ReadOnly));
        }
        Ok(word)
    }

    /// Bytes of a range, for comparisons.
    pub fn bytes(&self, va: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.read(va, &mut bytes).unwrap();
        bytes
    }

    /// Writes little-endian words.
    pub fn put(&self, va: u64, words: &[u32]) {
        for (index, word) in words.iter().enumerate() {
            self.write(va + 4 * index as u64, &word.to_le_bytes()).unwrap();
        }
    }
}

impl Memory for FakeMemory {
    fn read(&self, va: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < buffer.len() {
            let va = va.wrapping_add(done as u64);
            let word = self.find(va, Access::Read)?.load(Ordering::Relaxed);
            for (byte, to) in word.to_le_bytes()[(va % 8) as usize..].iter().zip(&mut buffer[done..]) {
                *to = *byte;
                done += 1;
            }
        }
        Ok(())
    }

    fn write(&self, va: u64, bytes: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < bytes.len() {
            let va = va.wrapping_add(done as u64);
            let word = self.find(va, Access::Write)?;
            let offset = (va % 8) as usize;
            let length = (8 - offset).min(bytes.len() - done);
            let update = |old: u64| {
                let mut new = old.to_le_bytes();
                new[offset..offset + length].copy_from_slice(&bytes[done..done + length]);
                Some(u64::from_le_bytes(new))
            };
            word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update).unwrap();
            done += length;
        }
        Ok(())
    }

    fn word(&self, va: u64, access: Access, operation: &mut dyn FnMut(&AtomicU32)) -> Result<(), Fault> {
        let word = self.find(va, access)?;
        assert!(va.is_multiple_of(4), "word at {va:#x}");
        let halves = word.as_ptr().cast::<u32>().wrapping_add((va % 8 / 4) as usize);
        // SAFETY: the pointer is to one half of an atomic that `self` keeps alive, aligned to 4 bytes.
        operation(unsafe { AtomicU32::from_ptr(halves) });
        Ok(())
    }

    fn double_word(
        &self,
        va: u64,
        access: Access,
        operation: &mut dyn FnMut(&AtomicU64),
    ) -> Result<(), Fault> {
        assert!(va.is_multiple_of(8), "double word at {va:#x}");
        operation(self.find(va, access)?);
        Ok(())
    }
}

/// What the world was told. Its clock goes on by one with each look.
#[derive(Default)]
pub struct FakeWorld {
    clock: AtomicU64,
    /// Interrupts in order.
    pub interrupts: Mutex<Vec<Interrupt>>,
    /// Faults in order.
    pub faults: Mutex<Vec<Fault>>,
    /// Failures of queues in order.
    pub failures: Mutex<Vec<Failure>>,
}

impl World for FakeWorld {
    fn interrupt(&self, interrupt: Interrupt) {
        self.interrupts.lock().unwrap().push(interrupt);
    }

    fn timestamp(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn memory_fault(&self, fault: &Fault) {
        self.faults.lock().unwrap().push(*fault);
    }

    fn queue_failed(&self, failure: &Failure) {
        self.failures.lock().unwrap().push(failure.clone());
    }
}

/// A GPU for one test.
pub struct FakeGpu {
    /// Its memory.
    pub memory: FakeMemory,
    /// What it told.
    pub world: FakeWorld,
    /// What runs its kernels.
    pub dispatcher: Box<dyn Dispatcher>,
    /// Steps shall end.
    pub stop: AtomicBool,
    /// No queue of the GPU may go on.
    pub evicted: AtomicBool,
}

impl FakeGpu {
    /// A GPU with this memory and without an instruction set.
    pub fn new(memory: FakeMemory) -> Self {
        let dispatcher = Box::new(EmptyKernels::for_gfx(9));
        let (stop, evicted) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { memory, world: FakeWorld::default(), dispatcher, stop, evicted }
    }

    /// What a step gets.
    pub fn context(&self) -> Context<'_> {
        Context {
            memory: &self.memory,
            world: &self.world,
            dispatcher: self.dispatcher.as_ref(),
            stop: &self.stop,
            evicted: &self.evicted,
        }
    }

    /// The memory with its helpers.
    pub fn memory(&self) -> &dyn Memory {
        &self.memory
    }

    /// Steps until the processor stops progressing; panics when it never does.
    pub fn run(&self, processor: &mut dyn Processor, doorbell: u64) -> Step {
        for _ in 0..1_000_000 {
            match processor.step(&self.context(), doorbell) {
                Step::Progressed => {}
                other => return other,
            }
        }
        panic!("the processor goes on for ever");
    }
}

/// Notes the 64-bit word at an address whenever there is an interrupt.
struct Watcher<'a> {
    memory: &'a FakeMemory,
    va: u64,
    seen: Mutex<Vec<u64>>,
}

impl World for Watcher<'_> {
    fn interrupt(&self, _: Interrupt) {
        let memory: &dyn Memory = self.memory;
        self.seen.lock().unwrap().push(memory.load64(self.va).unwrap());
    }

    fn timestamp(&self) -> u64 {
        0
    }

    fn memory_fault(&self, _: &Fault) {}

    fn queue_failed(&self, _: &Failure) {}
}

/// Runs a processor; what was at `va` at each interrupt.
pub fn seen_at_interrupts(gpu: &FakeGpu, processor: &mut dyn Processor, doorbell: u64, va: u64) -> Vec<u64> {
    let world = Watcher { memory: &gpu.memory, va, seen: Mutex::default() };
    let context = Context { world: &world, ..gpu.context() };
    while processor.step(&context, doorbell) == Step::Progressed {}
    world.seen.into_inner().unwrap()
}
