//! Handshake.

use virtio_kfd_protocol::calls::{Hello, Nop};
use virtio_kfd_protocol::version::{Features, VERSION_MAX, VERSION_MIN, agree};
use virtio_kfd_protocol::{HelloAnswer, HelloRequest, Nothing, Status};

use super::{Outcome, Reply};
use crate::context::Context;
use crate::failure::{Failure, expect_zero};

pub fn hello(context: &Context, frame_version: u32, request: &HelloRequest) -> Outcome<Hello> {
    expect_zero("Hello", &[request.pad.into(), frame_version.into()])?;
    let guest = (request.version_min, request.version_max);
    let version = agree(guest, (VERSION_MIN, VERSION_MAX))
        .map_err(|error| Failure::new(Status::HANDSHAKE, error.to_string()))?;
    if !context.agree(version) {
        return Err(Failure::invalid("Hello: this context had its handshake before"));
    }
    context.smi.greet(request);
    let name = request.name.split(|&byte| byte == 0).next().unwrap_or(&[]).escape_ascii();
    // Contexts are cheap for a guest, and a limit of one worker's lines would bound nothing.
    tracing::debug!("guest process {} ({name}), wire version {version}", request.guest_pid);
    let features = Features::from_bits_truncate(request.features);
    Ok(Reply::of(HelloAnswer {
        version,
        kfd_major: context.version.major,
        kfd_minor: context.version.minor,
        gpu_count: u32::try_from(context.gpus.len()).unwrap_or(u32::MAX),
        features: features.bits(),
    }))
}

pub fn nop() -> Outcome<Nop> {
    Ok(Reply::of(Nothing {}))
}
