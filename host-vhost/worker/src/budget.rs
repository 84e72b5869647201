//! What of the limits is used up.

use kfd_ipc::ledger::Account;

use crate::failure::Failure;

/// Bytes or numbers of one kind, and the most that this context may have.
#[derive(Debug)]
pub struct Budget {
    what: &'static str,
    used: u64,
    limit: u64,
    /// What all contexts of the VM may have together.
    vm: Option<Account>,
}

impl Budget {
    /// Nothing used.
    pub fn new(what: &'static str, limit: u64) -> Self {
        Budget { what, used: 0, limit, vm: None }
    }

    /// The same, counted against the VM's limit as well.
    pub fn with(self, vm: Option<Account>) -> Self {
        Budget { vm, ..self }
    }

    /// Takes `more`, or nothing if that goes over the limit.
    pub fn take(&mut self, more: u64) -> Result<(), Failure> {
        let Budget { what, used, limit, .. } = *self;
        let Some(sum) = used.checked_add(more).filter(|&sum| sum <= limit) else {
            return Err(Failure::limit(format!("{used} {what} are used, {more} more go over {limit}")));
        };
        if let Some(vm) = self.vm.as_ref().filter(|vm| more != 0 && !vm.take(more)) {
            let (left, limit) = (vm.left(), vm.limit());
            return Err(Failure::limit(format!(
                "{more} {what} asked for, the VM has {left} left of {limit}"
            )));
        }
        self.used = sum;
        Ok(())
    }

    /// Gives back what was taken.
    pub fn give(&mut self, less: u64) {
        let less = less.min(self.used);
        self.used = self.used.saturating_sub(less);
        if let Some(vm) = &self.vm {
            vm.give(less);
        }
    }

    /// What can still be taken.
    pub fn left(&self) -> u64 {
        let own = self.limit.saturating_sub(self.used);
        self.vm.as_ref().map_or(own, |vm| own.min(vm.left()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kfd_ipc::ledger::{Counted, Ledger};
    use virtio_kfd_protocol::Status;

    use super::*;

    #[test]
    fn limits_are_inclusive_and_do_not_overflow() {
        let mut budget = Budget::new("x", 7);
        budget.take(3).unwrap();
        assert_eq!(budget.take(5).unwrap_err().status, Status::LIMIT);
        assert_eq!(budget.take(u64::MAX).unwrap_err().status, Status::LIMIT);
        assert_eq!(budget.left(), 4);
        budget.take(4).unwrap();
        assert_eq!((budget.left(), budget.take(1).unwrap_err().status), (0, Status::LIMIT));
        budget.give(7);
        budget.take(7).unwrap();
        assert!(Budget::new("x", u64::MAX).take(u64::MAX).is_ok());
    }

    #[test]
    fn the_vms_limit_holds_beside_the_contexts_own() {
        let ledger = Arc::new(Ledger::create(2).unwrap());
        let budget = |slot| {
            let account = Account::new(ledger.clone(), slot, Counted::Vram, 10);
            Budget::new("x", 7).with(Some(account))
        };
        let (mut a, mut b) = (budget(0), budget(1));
        a.take(6).unwrap();
        assert_eq!((a.left(), b.left()), (1, 4));
        assert_eq!(b.take(5).unwrap_err().status, Status::LIMIT);
        b.take(4).unwrap();
        assert_eq!(a.take(1).unwrap_err().status, Status::LIMIT);
        a.take(0).unwrap();
        a.give(100);
        assert_eq!((a.left(), b.left(), ledger.sum(Counted::Vram)), (6, 3, 4));
    }
}
