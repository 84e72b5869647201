//! A compute unit at work: what the waves of a workgroup see for the length of a slice.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use kfd_isa::Target;
use kfd_isa::bus::{Bus, BusFault, Space};
use kfd_isa::code::{CodePage, Fetch};
use kfd_isa::gws::{Gws, Operation, Ticket};

use super::pages::{Pages, Translations};
use crate::arena::PAGE;
use crate::engine::view::PageTable;
use crate::engine::{Access, Interrupt, World};
use crate::space::Fault;

/// Pages of code that a compute unit keeps decoded: 256 KiB of code, which take some 6 MiB.
const MAX_CODE_PAGES: usize = 64;

/// `MSG_INTERRUPT` of `s_sendmsg`.
const MSG_INTERRUPT: u16 = 1;

/// Messages of a slice that are passed on; a wave that sends more is heard as if it had sent fewer.
const MAX_MESSAGES: usize = 64;

/// Code that was decoded, page by page.
///
/// A page is compared with memory when a kernel first uses it, so that whatever a program or a queue does about
/// instruction caches, no older code runs than hardware might run.
#[derive(Debug, Default)]
struct Code {
    pages: HashMap<u64, Arc<CodePage>>,
    /// The page that was used last, if it was compared in this kernel.
    last: Option<(u64, Arc<CodePage>)>,
    /// Pages that were compared in this kernel.
    checked: HashSet<u64>,
    /// The kernel.
    kernel: u64,
    generation: Option<u64>,
}

impl Code {
    /// Whatever was compared is compared again.
    fn forget(&mut self) {
        self.checked.clear();
        self.last = None;
    }
}

/// What a compute unit keeps from slice to slice.
#[derive(Debug, Default)]
pub struct UnitMemory {
    translations: Translations,
    code: Code,
}

impl UnitMemory {
    /// A workgroup of a kernel: if it is another one than that of the workgroup before, code is compared with memory again.
    pub fn begin_turn(&mut self, kernel: u64) {
        if self.code.kernel != kernel {
            self.code.kernel = kernel;
            self.code.forget();
        }
    }

    /// Begins a slice. Nothing changes the page table until what is returned is dropped.
    pub fn slice<'a>(
        &'a mut self,
        gpu_id: u32,
        target: Target,
        table: &'a dyn PageTable,
        world: &'a dyn World,
        gws: &'a Mutex<Gws>,
    ) -> Unit<'a> {
        let Self { translations, code } = self;
        let pages = translations.slice(gpu_id, table);
        let generation = Some(table.generation());
        if code.generation != generation {
            code.generation = generation;
            code.forget();
        }
        Unit { pages, code, target, world, gws, messages: Vec::new(), fault: None }
    }
}

/// What waves see for the length of a slice.
pub struct Unit<'a> {
    pages: Pages<'a>,
    code: &'a mut Code,
    target: Target,
    world: &'a dyn World,
    gws: &'a Mutex<Gws>,
    messages: Vec<u32>,
    fault: Option<Fault>,
}

impl Unit<'_> {
    /// Ends the slice: the messages that were sent in it, and the fault of the page table behind a [`BusFault`].
    pub fn end(self) -> (Vec<Interrupt>, Option<Fault>) {
        (self.messages.into_iter().map(Interrupt::Wave).collect(), self.fault)
    }

    fn fetch(&mut self, page: u64) -> Result<Arc<CodePage>, Fault> {
        // One word more: the second half of an instruction that begins at the end.
        let mut bytes = [0u8; PAGE as usize + 4];
        let (own, next) = bytes.split_at_mut(PAGE as usize);
        let start = page.wrapping_mul(PAGE);
        self.pages.fetch(start, own)?;
        // There may be no page behind this one, and no need for it.
        let has_next = self.pages.fetch(start.wrapping_add(PAGE), next).is_ok();
        let words = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        let words: Vec<u32> = words.take(PAGE as usize / 4 + usize::from(has_next)).collect();
        if let Some(known) = self.code.pages.get(&page)
            && known.words() == words
        {
            return Ok(known.clone());
        }
        if self.code.pages.len() >= MAX_CODE_PAGES {
            self.code.pages.clear();
            self.code.forget();
        }
        let new = Arc::new(CodePage::new(self.target, start, words));
        self.code.pages.insert(page, new.clone());
        Ok(new)
    }
}

/// Notes the fault for whoever reports it.
fn note(slot: &mut Option<Fault>, fault: Fault) -> BusFault {
    let write = fault.access == "write";
    *slot = Some(fault);
    BusFault::Page { va: fault.va, write }
}

impl Fetch for Unit<'_> {
    fn page(&mut self, pc: u64) -> Result<Arc<CodePage>, BusFault> {
        let page = pc / PAGE;
        if let Some((last, code)) = &self.code.last
            && *last == page
        {
            return Ok(code.clone());
        }
        let known =
            if self.code.checked.contains(&page) { self.code.pages.get(&page).cloned() } else { None };
        let code = match known {
            Some(code) => code,
            None => {
                let code = self.fetch(page).map_err(|fault| note(&mut self.fault, fault))?;
                self.code.checked.insert(page);
                code
            }
        };
        self.code.last = Some((page, code.clone()));
        Ok(code)
    }
}

impl Space for Unit<'_> {
    #[inline]
    fn load(&mut self, va: u64, to: &mut [u8]) -> Result<(), BusFault> {
        if let [low, high] = to
            && va.is_multiple_of(2)
        {
            let words = self.pages.half_words(va, Access::Read, 1);
            let words = words.map_err(|fault| note(&mut self.fault, fault))?;
            if let Some(word) = words.first() {
                [*low, *high] = word.load(Ordering::Acquire).to_le_bytes();
            }
            return Ok(());
        }
        let mut done = 0;
        while let Some(rest) = to.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let va = va.wrapping_add(done as u64);
            let bytes = self.pages.bytes(va, Access::Read, rest.len());
            let bytes = bytes.map_err(|fault| note(&mut self.fault, fault))?;
            for (to, byte) in rest.iter_mut().zip(bytes) {
                *to = byte.load(Ordering::Acquire);
            }
            done += bytes.len();
        }
        Ok(())
    }

    #[inline]
    fn store(&mut self, va: u64, from: &[u8]) -> Result<(), BusFault> {
        // Two bytes in one place are one store.
        if let [low, high] = *from
            && va.is_multiple_of(2)
        {
            let words = self.pages.half_words(va, Access::Write, 1);
            let words = words.map_err(|fault| note(&mut self.fault, fault))?;
            if let Some(word) = words.first() {
                word.store(u16::from_le_bytes([low, high]), Ordering::Release);
            }
            return Ok(());
        }
        let mut done = 0;
        while let Some(rest) = from.get(done..).filter(|rest| !rest.is_empty()) {
            let va = va.wrapping_add(done as u64);
            let bytes = self.pages.bytes(va, Access::Write, rest.len());
            let bytes = bytes.map_err(|fault| note(&mut self.fault, fault))?;
            for (from, byte) in rest.iter().zip(bytes) {
                byte.store(*from, Ordering::Release);
            }
            done += bytes.len();
        }
        Ok(())
    }

    #[inline]
    fn load_words(&mut self, va: u64, to: &mut [u32]) -> Result<(), BusFault> {
        let mut done = 0;
        while let Some(rest) = to.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let va = va.wrapping_add(done as u64 * 4);
            let words = self.pages.words(va, Access::Read, rest.len());
            let words = words.map_err(|fault| note(&mut self.fault, fault))?;
            if words.is_empty() {
                return Err(BusFault::Unaligned { va, size: 4 });
            }
            for (to, word) in rest.iter_mut().zip(words) {
                *to = word.load(Ordering::Acquire);
            }
            done += words.len();
        }
        Ok(())
    }

    #[inline]
    fn store_words(&mut self, va: u64, from: &[u32]) -> Result<(), BusFault> {
        let mut done = 0;
        while let Some(rest) = from.get(done..).filter(|rest| !rest.is_empty()) {
            let va = va.wrapping_add(done as u64 * 4);
            let words = self.pages.words(va, Access::Write, rest.len());
            let words = words.map_err(|fault| note(&mut self.fault, fault))?;
            if words.is_empty() {
                return Err(BusFault::Unaligned { va, size: 4 });
            }
            for (from, word) in rest.iter().zip(words) {
                word.store(*from, Ordering::Release);
            }
            done += words.len();
        }
        Ok(())
    }

    #[inline]
    fn atomic32(&mut self, va: u64, change: impl Fn(u32) -> u32) -> Result<u32, BusFault> {
        let words = self.pages.words(va, Access::Write, 1).map_err(|fault| note(&mut self.fault, fault))?;
        let word = words.first().ok_or(BusFault::Unaligned { va, size: 4 })?;
        let changed = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(change(old)));
        // It always gives a value, so that this never fails.
        Ok(changed.unwrap_or_else(|old| old))
    }

    #[inline]
    fn atomic64(&mut self, va: u64, change: impl Fn(u64) -> u64) -> Result<u64, BusFault> {
        let words = self.pages.double_words(va, Access::Write, 1);
        let words = words.map_err(|fault| note(&mut self.fault, fault))?;
        let word = words.first().ok_or(BusFault::Unaligned { va, size: 8 })?;
        let changed = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(change(old)));
        Ok(changed.unwrap_or_else(|old| old))
    }
}

impl Bus for Unit<'_> {
    fn clock(&mut self) -> u64 {
        self.world.timestamp()
    }

    fn message(&mut self, message: u16, m0: u32) {
        if message & 0xf == MSG_INTERRUPT && self.messages.len() < MAX_MESSAGES {
            self.messages.push(m0);
        }
    }

    fn fence(&mut self) {
        fence(Ordering::SeqCst);
    }

    fn gws(&mut self, resource: u32, operation: Operation, ticket: Option<Ticket>) -> Option<Ticket> {
        self.gws.lock().unwrap_or_else(PoisonError::into_inner).ask(resource, operation, ticket)
    }

    fn invalidate_code(&mut self) {
        self.code.forget();
    }

    fn is_exhausted(&self) -> bool {
        self.pages.is_exhausted()
    }
}
