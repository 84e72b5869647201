//! Finding the host and greeting it.

use std::ffi::OsString;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use virtio_kfd_protocol::calls::Hello;
use virtio_kfd_protocol::version::{VERSION_MAX, VERSION_MIN, agree};
use virtio_kfd_protocol::{Features, HelloAnswer, HelloRequest, limits};

use super::answers::AnswerArena;
use super::rings::{FEWEST, WaitRings};
use super::{Client, ConnectError};
use crate::transport::virtgpu::VirtGpu;
use crate::transport::{Transport, TransportError};

/// Environment variable: the socket of a `vhost-user-kfd` to talk to without a VM, or of a process that keeps such a VM for
/// several.
pub const LOOPBACK_VARIABLE: &str = "VIRTIO_KFD_LOOPBACK";

/// Environment variable: the render node to use, in place of the first one that speaks virtio-kfd.
pub const DEVICE_VARIABLE: &str = "VIRTIO_KFD_DEVICE";

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The transport that the environment chooses.
pub(super) fn transport() -> Result<Box<dyn Transport>, TransportError> {
    if let Some(socket) = variable(LOOPBACK_VARIABLE) {
        return loopback(Path::new(&socket));
    }
    let device = match variable(DEVICE_VARIABLE) {
        Some(path) => VirtGpu::open(Path::new(&path))?,
        None => VirtGpu::find()?,
    };
    Ok(Box::new(device))
}

#[cfg(feature = "loopback")]
fn loopback(socket: &Path) -> Result<Box<dyn Transport>, TransportError> {
    use crate::transport::loopback::{LoopbackVm, SharedContext};
    match SharedContext::connect(socket)? {
        Some(shared) => Ok(Box::new(shared)),
        None => Ok(Box::new(LoopbackVm::connect(socket)?.context()?)),
    }
}

#[cfg(not(feature = "loopback"))]
fn loopback(socket: &Path) -> Result<Box<dyn Transport>, TransportError> {
    let socket = socket.display();
    Err(TransportError::NoDevice(format!(
        "{LOOPBACK_VARIABLE}={socket}: this library was built without loop-back"
    )))
}

impl Client {
    /// Connects over a transport: agrees on a version and greets.
    pub fn over(transport: Box<dyn Transport>) -> Result<Client, ConnectError> {
        let capset = *transport.capset();
        let version = agree((VERSION_MIN, VERSION_MAX), (capset.version_min, capset.version_max))?;
        let offer = |what, found, expected| ConnectError::Offer { what, found, expected };
        if capset.max_rings < FEWEST {
            return Err(offer("rings", capset.max_rings.into(), "at least 3"));
        }
        if (capset.max_frame_bytes as usize) < limits::MAX_FRAME_BYTES {
            return Err(offer("bytes of frame", capset.max_frame_bytes.into(), "at least 128 KiB"));
        }
        if (capset.max_answer_bytes as usize) < limits::MAX_ANSWER_BYTES {
            return Err(offer("bytes of answer", capset.max_answer_bytes.into(), "at least 128 KiB"));
        }
        let mut client = Client {
            answers: AnswerArena::new(),
            transport,
            rings: WaitRings::new(capset.max_rings),
            hello: HelloAnswer { version, ..Default::default() },
            sequence: AtomicU64::new(1),
            lost: OnceLock::new(),
            owner: std::process::id(),
        };
        let offered = Features::from_bits_truncate(capset.features);
        let request = HelloRequest {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: offered.bits(),
            guest_pid: client.owner,
            name: process_name(),
            ..Default::default()
        };
        let (hello, _) = client.greet::<Hello>(&request).map_err(ConnectError::Hello)?;
        if hello.version != version {
            return Err(offer("as wire version", hello.version.into(), "what its capset agrees on"));
        }
        client.hello = HelloAnswer { features: hello.features & offered.bits(), ..hello };
        Ok(client)
    }
}

/// The process's name, cut to what the wire has room for.
fn process_name() -> [u8; 16] {
    let mut name = [0; 16];
    // Only for the host's logs: without it the name stays empty.
    let comm = std::fs::read("/proc/self/comm").unwrap_or_default();
    for (place, byte) in name.iter_mut().zip(comm.into_iter().take_while(|&byte| byte != b'\n')) {
        *place = byte;
    }
    name
}
