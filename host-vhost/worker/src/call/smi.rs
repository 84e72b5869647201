//! System management events.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use virtio_kfd_protocol::calls::{CloseSmi, OpenSmi, ReadSmi};
use virtio_kfd_protocol::{
    GpuRequest, Nothing, ReadSmiAnswer, ReadSmiRequest, SMI_CLOSED, SMI_LINES, SMI_NOTHING, SmiStream,
};

use super::{Outcome, Reply};
use crate::context::Context;
use crate::failure::{Failure, expect_zero};
use crate::smi::Read;

pub fn open_smi(context: &Context, request: &GpuRequest) -> Outcome<OpenSmi> {
    expect_zero("OpenSmi", &[request.pad.into()])?;
    context.gpu(request.gpu_id)?;
    let stream = context.smi.open(&context.kfd, request.gpu_id.0)?;
    Ok(Reply::of(SmiStream { stream, pad: 0 }))
}

pub fn close_smi(context: &Context, request: &SmiStream) -> Outcome<CloseSmi> {
    expect_zero("CloseSmi", &[request.pad.into()])?;
    context.smi.close(request.stream)?;
    Ok(Reply::of(Nothing {}))
}

pub fn read_smi(context: &Context, request: &ReadSmiRequest) -> Outcome<ReadSmi> {
    expect_zero("ReadSmi", &[request.pad.into()])?;
    let timeout = (request.timeout != u32::MAX).then(|| Duration::from_millis(request.timeout.into()));
    let (outcome, stream, text) = match context.smi.read(timeout, &context.throttle)? {
        Read::Lines { stream, text } => (SMI_LINES, stream, text),
        Read::Nothing => (SMI_NOTHING, 0, Vec::new()),
        Read::Closed => (SMI_CLOSED, 0, Vec::new()),
    };
    let clock = clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map_err(|errno| Failure::invalid(format!("ReadSmi: no CLOCK_BOOTTIME: {errno}")))?;
    let boot_time = u64::try_from(Duration::from(clock).as_nanos()).unwrap_or(u64::MAX);
    Ok(Reply::with(ReadSmiAnswer { outcome, stream, boot_time }, text))
}
