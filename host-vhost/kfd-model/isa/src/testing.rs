//! Memory and code for tests.

use std::sync::Arc;

use crate::bus::{Bus, BusFault, Space};
use crate::code::{CodePage, Fetch, PAGE};
use crate::group::{Group, Halt, Progress};
use crate::gws::{Gws, Operation, Ticket};
use crate::inst::Inst;
use crate::mem::lds::Lds;
use crate::op::Target;
use crate::start::Start;
use crate::wave::Wave;
use crate::{decode, mem};

/// Where code lies.
pub const CODE: u64 = 0x10_0000;
/// Where data lie.
pub const DATA: u64 = 0x7f00_0000_0000;
/// Bytes of them.
pub const SIZE: usize = 0x1_0000;

/// A machine with a page of code and some data; every byte of these has the low bits of its address.
pub struct Machine {
    /// The data.
    pub data: Vec<u8>,
    /// Messages that were sent, with M0.
    pub messages: Vec<(u16, u32)>,
    /// Global wave sync.
    pub gws: Gws,
    /// Loads of words that are left before it is exhausted.
    pub accesses: u32,
    code: Arc<CodePage>,
}

impl Machine {
    pub fn new(code: &[u32]) -> Self {
        let mut words = code.to_vec();
        words.resize((PAGE / 4) as usize, 0);
        let data = (0..SIZE).map(|index| index as u8).collect();
        Self {
            data,
            messages: Vec::new(),
            accesses: u32::MAX,
            gws: Gws::default(),
            code: Arc::new(CodePage::new(Target::Gfx906, CODE, words)),
        }
    }

    fn place(&mut self, va: u64, length: usize, write: bool) -> Result<&mut [u8], BusFault> {
        let fault = BusFault::Page { va, write };
        let start = usize::try_from(va.checked_sub(DATA).ok_or(fault)?).map_err(|_| fault)?;
        self.data.get_mut(start..start + length).ok_or(fault)
    }

    pub fn word(&mut self, va: u64) -> u32 {
        let mut word = [0];
        self.load_words(va, &mut word).unwrap();
        word[0]
    }

    /// Runs a group to its end.
    pub fn run(&mut self, group: &mut Group) -> Result<(), Halt> {
        for _ in 0..1000 {
            if group.run(1000, self)? == Progress::Done {
                return Ok(());
            }
        }
        panic!("the workgroup goes on for ever");
    }
}

impl Space for Machine {
    fn load(&mut self, va: u64, to: &mut [u8]) -> Result<(), BusFault> {
        to.copy_from_slice(self.place(va, to.len(), false)?);
        Ok(())
    }

    fn store(&mut self, va: u64, from: &[u8]) -> Result<(), BusFault> {
        self.place(va, from.len(), true)?.copy_from_slice(from);
        Ok(())
    }

    fn load_words(&mut self, va: u64, to: &mut [u32]) -> Result<(), BusFault> {
        assert!(va.is_multiple_of(4));
        self.accesses = self.accesses.saturating_sub(1);
        for (index, word) in to.iter_mut().enumerate() {
            let bytes = self.place(va + 4 * index as u64, 4, false)?;
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(())
    }

    fn store_words(&mut self, va: u64, from: &[u32]) -> Result<(), BusFault> {
        assert!(va.is_multiple_of(4));
        for (index, word) in from.iter().enumerate() {
            self.store(va + 4 * index as u64, &word.to_le_bytes())?;
        }
        Ok(())
    }

    fn atomic32(&mut self, va: u64, change: impl Fn(u32) -> u32) -> Result<u32, BusFault> {
        let mut word = [0];
        self.load_words(va, &mut word)?;
        self.store_words(va, &[change(word[0])])?;
        Ok(word[0])
    }

    fn atomic64(&mut self, va: u64, change: impl Fn(u64) -> u64) -> Result<u64, BusFault> {
        let mut bytes = [0; 8];
        self.load(va, &mut bytes)?;
        let old = u64::from_le_bytes(bytes);
        self.store(va, &change(old).to_le_bytes())?;
        Ok(old)
    }
}

impl Bus for Machine {
    fn clock(&mut self) -> u64 {
        0x1234_5678_9abc
    }

    fn message(&mut self, message: u16, m0: u32) {
        self.messages.push((message, m0));
    }

    fn fence(&mut self) {}

    fn gws(&mut self, resource: u32, operation: Operation, ticket: Option<Ticket>) -> Option<Ticket> {
        self.gws.ask(resource, operation, ticket)
    }

    fn invalidate_code(&mut self) {}

    fn is_exhausted(&self) -> bool {
        self.accesses == 0
    }
}

impl Fetch for Machine {
    fn page(&mut self, pc: u64) -> Result<Arc<CodePage>, BusFault> {
        if pc / PAGE == CODE / PAGE {
            Ok(self.code.clone())
        } else {
            Err(BusFault::Page { va: pc, write: false })
        }
    }
}

/// A workgroup of so many work-items that starts at [`CODE`], with the data's address in s0 and s1.
pub fn start(items: u32) -> Start {
    let mut user = [0; 16];
    user[0] = DATA as u32;
    user[1] = (DATA >> 32) as u32;
    Start {
        entry: CODE,
        rsrc1: 7,
        rsrc2: 2 << 1,
        user,
        id: [0; 3],
        size: [items, 1, 1],
        group_segment: 1024,
        unit: 0,
    }
}

/// Executes one memory instruction.
pub fn execute(
    wave: &mut Wave,
    words: &[u32],
    lds: &mut Lds,
    machine: &mut Machine,
) -> Result<(), crate::stop::Stop> {
    let inst: Inst = decode(Target::Gfx906, words).unwrap();
    mem::execute(wave, &inst, lds, machine)
}

/// A word of [`Machine::data`] as it is at first.
pub fn pattern(offset: u32) -> u32 {
    u32::from_le_bytes(core::array::from_fn(|index| (offset + index as u32) as u8))
}
