//! What the client never asks of the guest's driver, which passes much of it on to the host.
#![allow(unsafe_code)] // ioctls with arguments that no wrapper would pass

use std::fs::File;
use std::os::fd::AsRawFd;

use anyhow::Result;
use kfd_abi::virtgpu::{self as abi, ContextInit, ContextSetParam, Execbuffer, ResourceCreateBlob};
use zerocopy::IntoBytes;

use super::Report;
use crate::random::Random;
use crate::raw::Raw;

fn ioctl<T: IntoBytes>(file: &File, request: u32, argument: &mut T) -> std::io::Result<()> {
    // SAFETY: the argument has the size that the request says; pointers in it are null, or to memory that lives beyond
    // the call, or wrong on purpose, which the kernel answers with EFAULT.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request.into(), std::ptr::from_mut(argument)) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn context(file: &File, parameters: &[ContextSetParam]) -> std::io::Result<()> {
    let mut init = ContextInit {
        num_params: parameters.len() as u32,
        pad: 0,
        ctx_set_params: parameters.as_ptr().expose_provenance() as u64,
    };
    ioctl(file, abi::request::CONTEXT_INIT, &mut init)
}

/// Contexts of other kinds, commands of any size on any ring, blobs of any kind.
pub fn nonsense(random: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let nodes = || {
        let entries = std::fs::read_dir(guest_thunk::transport::virtgpu::DRI_DIRECTORY);
        let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
        paths.filter(|path| path.to_string_lossy().contains("renderD"))
    };
    let open = |path: &std::path::Path| File::options().read(true).write(true).open(path);
    let parameter = |param: u64, value: u64| ContextSetParam { param, value };
    for path in nodes() {
        for (id, rings) in [(8, 65), (8, 1 << 32), (9, 1), (0, 1), (63, 1), (64, 1)] {
            let Ok(file) = open(&path) else { continue };
            let made = context(
                &file,
                &[
                    parameter(abi::VIRTGPU_CONTEXT_PARAM_CAPSET_ID, id),
                    parameter(abi::VIRTGPU_CONTEXT_PARAM_NUM_RINGS, rings),
                ],
            );
            report.must_err(|| format!("a context of capset {id} with {rings} rings"), &made);
        }
        // Without CONTEXT_INIT the driver makes a context of capset 0 by itself.
        for round in 0..40 {
            let Ok(file) = open(&path) else { continue };
            if round % 2 == 0 {
                let parameters = [
                    parameter(abi::VIRTGPU_CONTEXT_PARAM_CAPSET_ID, 8),
                    parameter(abi::VIRTGPU_CONTEXT_PARAM_NUM_RINGS, 64),
                ];
                context(&file, &parameters)?;
            }
            let words = 1 + random.below(300) as usize;
            let bytes = random.bytes(4 * words);
            let mut exec = Execbuffer {
                flags: random.below(8) as u32,
                size: bytes.len() as u32,
                command: bytes.as_ptr().expose_provenance() as u64,
                fence_fd: -1,
                ring_idx: random.below(130) as u32,
                ..Default::default()
            };
            let sent = ioctl(&file, abi::request::EXECBUFFER, &mut exec);
            report.sent += 1;
            report.refused += u64::from(sent.is_err());
            report.ended += u64::from(sent.is_ok());
            for _ in 0..4 {
                let mut blob = ResourceCreateBlob {
                    blob_mem: random.below(5) as u32,
                    blob_flags: random.below(16) as u32,
                    size: random.nasty() & 0x3f_ffff,
                    blob_id: random.nasty(),
                    ..Default::default()
                };
                let made = ioctl(&file, abi::request::RESOURCE_CREATE_BLOB, &mut blob);
                report.sent += 1;
                report.refused += u64::from(made.is_err());
                report.ended += u64::from(made.is_ok());
            }
        }
    }
    if nodes().next().is_none() {
        // Loop-back: there is no driver; the commands themselves are attacked there.
        report.sent = 1;
    }
    let _ = Raw::connect()?;
    Ok(())
}
