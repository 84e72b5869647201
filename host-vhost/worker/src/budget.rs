//! What of the limits is used up.

use crate::failure::Failure;

/// Bytes or numbers of one kind, and the most that this context may have.
#[derive(Debug)]
pub struct Budget {
    what: &'static str,
    used: u64,
    limit: u64,
}

impl Budget {
    /// Nothing used.
    pub fn new(what: &'static str, limit: u64) -> Self {
        Budget { what, used: 0, limit }
    }

    /// Takes `more`, or nothing if that goes over the limit.
    pub fn take(&mut self, more: u64) -> Result<(), Failure> {
        let Budget { what, used, limit } = *self;
        match used.checked_add(more).filter(|&sum| sum <= limit) {
            Some(sum) => {
                self.used = sum;
                Ok(())
            }
            None => Err(Failure::limit(format!("{used} {what} are used, {more} more go over {limit}"))),
        }
    }

    /// Gives back what was taken.
    pub fn give(&mut self, less: u64) {
        self.used = self.used.saturating_sub(less);
    }

    /// What can still be taken.
    pub fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

#[cfg(test)]
mod tests {
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
}
