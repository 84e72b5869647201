//! Virtqueues, as both devices serve them.

use std::sync::Arc;

use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_user_backend::{VringRwLock, VringT};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};

use crate::chain::Ram;
use crate::guest_warn;
use crate::rate::LogBudget;

/// Feature bits of every device.
pub const FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Bytes of config space that can be read; what the device does not have is zero.
const CONFIG_SPACE: usize = 256;

/// What came off a queue.
pub enum Next {
    /// A chain, and its head.
    Chain(DescriptorChain<Arc<Ram>>, u16),
    /// None at the moment.
    Empty,
    /// The queue is stopped, or the driver broke its rules: nothing more until it is set up anew.
    Dead,
}

/// What both devices have of vhost-user. INFLIGHT_SHMFD cannot be served by the crate and is not offered.
pub fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::BACKEND_SEND_FD
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::SHMEM
}

/// A piece of a config space that begins with `space`; empty beyond its end.
pub fn config_piece(mut space: Vec<u8>, offset: u32, size: u32) -> Vec<u8> {
    space.resize(CONFIG_SPACE, 0);
    let end = offset.saturating_add(size);
    space.get(offset as usize..end as usize).map(<[u8]>::to_vec).unwrap_or_default()
}

/// Takes a chain off a queue.
pub fn next_chain(vring: &VringRwLock, ram: Arc<Ram>, log: &mut LogBudget) -> Next {
    let mut ring = vring.get_mut();
    if !ring.is_enabled() {
        return Next::Dead;
    }
    let queue = ring.get_queue_mut();
    match queue.iter(ram).map(|mut chains| chains.next()) {
        Ok(Some(chain)) => {
            let head = chain.head_index();
            Next::Chain(chain, head)
        }
        Ok(None) => Next::Empty,
        Err(error) => {
            if queue.ready() {
                guest_warn!(log, "the guest's driver broke a queue: {error}");
            }
            Next::Dead
        }
    }
}

/// Asks to be notified again. Returns whether something came meanwhile.
pub fn wants_more(vring: &VringRwLock, ram: &Ram) -> bool {
    vring.get_mut().get_queue_mut().enable_notification(ram).unwrap_or(false)
}

/// Gives a chain back, with so many bytes written to it.
pub fn give_back(vring: &VringRwLock, ram: &Ram, head: u16, written: u32) {
    if let Err(error) = vring.get_mut().get_queue_mut().add_used(ram, head, written) {
        tracing::debug!("used ring: {error}");
    }
}

/// Tells the driver, if it wants to be told.
pub fn signal(vring: &VringRwLock, ram: &Ram) {
    let mut ring = vring.get_mut();
    // A ring that cannot be read is signalled rather than left alone.
    if ring.get_queue_mut().needs_notification(ram).unwrap_or(true)
        && let Err(error) = ring.signal_used_queue()
    {
        tracing::debug!("the VMM cannot be notified: {error}");
    }
}
