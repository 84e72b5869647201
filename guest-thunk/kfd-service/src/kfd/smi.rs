//! System management events.

use std::os::fd::IntoRawFd;

use guest_thunk::thunk::smi::OpenError;
use kfd_abi::smi::SmiEventsArgs;
use kfd_seam::Result;
use nix::errno::Errno;

use super::Call;
use crate::failure::errno;

impl Call<'_> {
    /// A descriptor of the process's own, which the library serves.
    pub(super) fn smi_events(&self) -> Result<i32> {
        self.run(|arguments: &mut SmiEventsArgs| {
            let gpu_id = self.kfd.gpu(arguments.gpuid).ok_or(Errno::EINVAL)?.gpu_id;
            let stream = self.kfd.smi.open(&self.kfd.client, gpu_id).map_err(|error| match error {
                OpenError::Host(error) => errno(error),
                OpenError::System(error) => error.raw_os_error().map_or(Errno::ENOMEM, Errno::from_raw),
            })?;
            arguments.anon_fd = stream.into_raw_fd().cast_unsigned();
            Ok(())
        })
    }
}
