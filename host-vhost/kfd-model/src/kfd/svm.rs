//! Attributes of shared virtual memory.

use kfd_abi::svm::{KFD_IOCTL_SVM_OP_GET_ATTR, KFD_IOCTL_SVM_OP_SET_ATTR, SvmArgs, SvmAttribute};
use kfd_seam::{Exchange, Result, UserMemory};
use nix::errno::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::Call;
use crate::arena::PAGE;
use crate::process::State;
use crate::space::{Backing, Mapping};
use crate::svm::{self, Gpus};
use crate::user;

impl Call<'_> {
    /// `kfd_ioctl_svm_validate`, `kfd_ioctl_svm`. The attributes stand behind the arguments, as many as the request's
    /// size has room for: 16 KiB at most.
    pub(super) fn svm(&self) -> Result<i32> {
        let exchange = Exchange::kfd(self.user, self.kernel);
        let mut bytes = vec![0; exchange.bytes_in.max(size_of::<SvmArgs>())];
        let read = bytes.get_mut(..exchange.bytes_in).ok_or(Errno::EFAULT)?;
        UserMemory.read_bytes(self.argument, read)?;
        let (arguments, rest) = SvmArgs::read_from_prefix(&bytes).map_err(|_| Errno::EFAULT)?;
        let count = arguments.nattr as usize;
        let size = count.saturating_mul(size_of::<SvmAttribute>());
        let given = rest.get(..size).filter(|_| exchange.bytes_in >= size_of::<SvmArgs>());
        let attributes = given.and_then(|given| <[SvmAttribute]>::ref_from_bytes(given).ok());
        let mut attributes = attributes.ok_or(Errno::EINVAL)?.to_vec();
        let result = self.svm_on(&arguments, &mut attributes);
        // Copied out when it failed too.
        UserMemory.write_bytes(self.argument.offset(size_of::<SvmArgs>() as u64)?, attributes.as_bytes())?;
        result.map(|()| 0)
    }

    fn svm_on(&self, arguments: &SvmArgs, attributes: &mut [SvmAttribute]) -> Result<()> {
        if !self.process.svm {
            return Err(Errno::EPERM);
        }
        let SvmArgs { start_addr: start, size, op, .. } = *arguments;
        let aligned = |value: u64| value != 0 && value.is_multiple_of(PAGE);
        if !aligned(start) || !aligned(size) {
            return Err(Errno::EINVAL);
        }
        let index = |gpu_id| self.process.index_of(gpu_id);
        let mut state = self.process.state();
        let all = (0..self.process.devices.len()).map(svm::bit).fold(0, |all: Gpus, gpu| all | gpu);
        let defaults = (all, state.xnack);
        match op {
            KFD_IOCTL_SVM_OP_SET_ATTR => {
                svm::check(attributes, &index)?;
                if !state.devices.iter().any(|device| device.drm_file.is_some()) {
                    return Err(Errno::EINVAL);
                }
                self.svm_valid(&state, start, size)?;
                let changed = state.svm.set(start, size, attributes, &index, defaults);
                for (number, device) in self.process.devices.iter().enumerate() {
                    let mut space = device.space_mut();
                    for (start, size, attributes) in &changed {
                        let flags = attributes.reaches(number).then(|| attributes.page_flags(&device.gpu));
                        let mapping = flags.map(|flags| Mapping {
                            size: *size,
                            backing: Backing::User(*start),
                            object: 0,
                            flags,
                        });
                        space.set_svm(*start, *size, mapping)?;
                    }
                }
                Ok(())
            }
            KFD_IOCTL_SVM_OP_GET_ATTR => {
                self.svm_valid(&state, start, size)?;
                state.svm.get(start, size, attributes, &index, defaults)
            }
            _ => Err(Errno::EINVAL),
        }
    }

    /// `svm_range_is_valid`, `svm_range_check_vm`.
    fn svm_valid(&self, state: &State, start: u64, size: u64) -> Result<()> {
        start.checked_add(size).ok_or(Errno::EOVERFLOW)?;
        user::check(start, size)?;
        for (device, own) in self.process.devices.iter().zip(&state.devices) {
            if own.drm_file.is_some() && device.space().is_mapped(start, size) {
                return Err(Errno::EADDRINUSE);
            }
        }
        Ok(())
    }
}
