//! Memory in use: of this process and of all processes of one machine, against what the machine has
//! (`kfd_mem_limit`, `amdgpu_amdkfd_reserve_mem_limit`).

use std::sync::{Mutex, MutexGuard, PoisonError};

use kfd_seam::Result;
use nix::errno::Errno;

use crate::shared_machine::{MAX_GPUS, SharedMachine};

/// `VRAM_AVAILABLITY_ALIGN`.
const VRAM_AVAILABILITY_ALIGN: u64 = 2 << 20;

/// Limits in bytes.
#[derive(Clone, Debug)]
pub struct Limits {
    /// All system memory for GPUs.
    pub system: u64,
    /// What the driver itself allocates (half of the memory, TTM's default).
    pub driver: u64,
    /// VRAM of each GPU without what the page tables may need.
    pub vram: Vec<u64>,
}

/// What a buffer costs, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charge {
    /// System memory, of the driver and of user pointers.
    pub system: u64,
    /// System memory that the driver allocated.
    pub driver: u64,
    /// VRAM, and of which GPU.
    pub vram: Option<(usize, u64)>,
}

/// VRAM of one GPU in use, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vram {
    /// Sum of the buffers' sizes.
    pub used: u64,
    /// The same, each buffer rounded up to 2 MiB.
    pub aligned: u64,
}

/// Memory in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// System memory.
    pub system: u64,
    /// System memory that the driver allocated.
    pub driver: u64,
    /// VRAM of each GPU.
    pub vram: [Vram; MAX_GPUS],
}

impl Default for Counts {
    fn default() -> Self {
        Self { system: 0, driver: 0, vram: [Vram::default(); MAX_GPUS] }
    }
}

impl Counts {
    /// Adds what another process uses. Such a process can have written anything.
    pub fn add(&mut self, other: &Self) {
        self.system = self.system.saturating_add(other.system);
        self.driver = self.driver.saturating_add(other.driver);
        for (vram, other) in self.vram.iter_mut().zip(&other.vram) {
            vram.used = vram.used.saturating_add(other.used);
            vram.aligned = vram.aligned.saturating_add(other.aligned);
        }
    }

    fn charge(&mut self, charge: &Charge) {
        self.system = self.system.saturating_add(charge.system);
        self.driver = self.driver.saturating_add(charge.driver);
        if let Some((gpu, size)) = charge.vram
            && let Some(vram) = self.vram.get_mut(gpu)
        {
            vram.used = vram.used.saturating_add(size);
            vram.aligned = vram.aligned.saturating_add(aligned(size));
        }
    }

    fn refund(&mut self, charge: &Charge) {
        self.system = self.system.saturating_sub(charge.system);
        self.driver = self.driver.saturating_sub(charge.driver);
        if let Some((gpu, size)) = charge.vram
            && let Some(vram) = self.vram.get_mut(gpu)
        {
            vram.used = vram.used.saturating_sub(size);
            vram.aligned = vram.aligned.saturating_sub(aligned(size));
        }
    }
}

fn aligned(size: u64) -> u64 {
    size.checked_next_multiple_of(VRAM_AVAILABILITY_ALIGN).unwrap_or(u64::MAX)
}

/// The account of a process.
#[derive(Debug)]
pub struct Ledger {
    limits: Limits,
    own: Mutex<Counts>,
    machine: Option<SharedMachine>,
}

impl Ledger {
    /// An empty account; with `machine`, all processes that share it are counted together.
    pub fn new(limits: Limits, machine: Option<SharedMachine>) -> Self {
        Self { limits, own: Mutex::default(), machine }
    }

    /// The limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    fn own(&self) -> MutexGuard<'_, Counts> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This is a copy in a forked child. Nothing may be asked of it any more.
    pub fn leave_to_parent(&self) {
        if let Some(machine) = &self.machine {
            machine.leave_to_parent();
        }
    }

    /// Takes memory (`amdgpu_amdkfd_reserve_mem_limit`).
    ///
    /// # Errors
    /// `ENOMEM` when the machine has not enough; what reading the machine's file answers.
    pub fn take(&self, charge: &Charge) -> Result<()> {
        let mut own = self.own();
        let mut wanted = own.clone();
        wanted.charge(charge);
        let fits = |others: &Counts| {
            let mut all = others.clone();
            all.add(&wanted);
            let vram = match charge.vram {
                Some((gpu, _)) => {
                    let limit = self.limits.vram.get(gpu).copied().unwrap_or(0);
                    all.vram.get(gpu).is_some_and(|vram| vram.used <= limit)
                }
                None => true,
            };
            let system = all.system <= self.limits.system && all.driver <= self.limits.driver;
            if system && vram { Ok(()) } else { Err(Errno::ENOMEM) }
        };
        match &self.machine {
            Some(machine) => machine.change(&wanted, fits)?,
            None => fits(&Counts::default())?,
        }
        *own = wanted;
        Ok(())
    }

    /// Gives memory back.
    pub fn give(&self, charge: &Charge) {
        let mut own = self.own();
        own.refund(charge);
        if let Some(machine) = &self.machine {
            // It cannot be refused. Where the file cannot be written, the next change writes it.
            let _ = machine.change(&own, |_| Ok(()));
        }
    }

    /// What all processes of the machine use.
    ///
    /// # Errors
    /// What reading the machine's file answers.
    pub fn in_use(&self) -> Result<Counts> {
        let own = self.own();
        let mut all = match &self.machine {
            Some(machine) => machine.others()?,
            None => Counts::default(),
        };
        all.add(&own);
        Ok(all)
    }

    /// VRAM of a GPU that is left for buffers (`amdgpu_amdkfd_get_available_memory`).
    ///
    /// # Errors
    /// As [`Self::in_use`].
    pub fn available(&self, gpu: usize) -> Result<u64> {
        let limit = self.limits.vram.get(gpu).copied().unwrap_or(0);
        let used = self.in_use()?.vram.get(gpu).map_or(0, |vram| vram.aligned);
        let left = limit.saturating_sub(used);
        Ok(left - left % VRAM_AVAILABILITY_ALIGN)
    }
}
