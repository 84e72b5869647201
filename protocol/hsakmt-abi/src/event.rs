//! Events.

use zerocopy::transmute;

use crate::bits::{abi_bits, abi_enums};
use crate::layout::{abi_consts, abi_structs};
use crate::release::ROCM_6;

/// Id of an event (`HSA_EVENTID`).
pub type HsaEventId = u32;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// A word in the process that belongs to an event.
    struct HsaSyncVar = "HsaSyncVar", size 16, pack 4 {
        /// Its address, 0 for none.
        user_data_ptr_value as "SyncVar.UserDataPtrValue": u64 = 0;
        /// Its size in bytes.
        sync_var_size as "SyncVarSize": u64 = 8;
    }

    /// What a node change event says.
    struct HsaNodeChange = "HsaNodeChange", size 4, pack 4 {
        /// Added or removed.
        flags as "Flags": HsaNodeChangeFlags = 0;
    }

    /// What a device state event says.
    struct HsaDeviceStateChange = "HsaDeviceStateChange", size 12, pack 4 {
        /// The device's node.
        node_id as "NodeId": u32 = 0;
        /// CPU or GPU.
        device as "Device": HsaDevice = 4;
        /// Started or stopped.
        flags as "Flags": HsaDeviceStateChangeFlags = 8;
    }

    /// What a memory event says.
    struct HsaMemoryAccessFault = "HsaMemoryAccessFault", size 20, pack 4 {
        /// The GPU's node.
        node_id as "NodeId": u32 = 0;
        /// The address.
        virtual_address as "VirtualAddress": u64 = 4;
        /// Why.
        failure as "Failure": HsaAccessAttributeFailure = 12;
        /// How bad.
        flags as "Flags": HsaEventIdMemoryFlags = 16;
    }

    /// What a hardware exception event says.
    struct HsaHwException = "HsaHwException", size 16, pack 4, since(ROCM_6) {
        /// The GPU's node.
        node_id as "NodeId": u32 = 0;
        /// 0 the whole GPU was reset, 1 an engine.
        reset_type as "ResetType": u32 = 4;
        /// 1 if the GPU's memory was lost.
        memory_lost as "MemoryLost": u32 = 8;
        /// Why.
        reset_cause as "ResetCause": HsaHwExceptionCause = 12;
    }

    /// What an event says.
    struct HsaEventData = "HsaEventData", size 44, pack 4 {
        /// Its type, which says what the union holds.
        event_type as "EventType": HsaEventType = 0;
        /// The union of what the types say; see the methods.
        event_data as "EventData": [u32; 5] = 4;
        /// The library's own: the event's id.
        hw_data1 as "HWData1": u64 = 24;
        /// The library's own: address of the event's slot.
        hw_data2 as "HWData2": u64 = 32;
        /// The library's own: the trigger value.
        hw_data3 as "HWData3": u32 = 40;
    }

    /// An event to create.
    struct HsaEventDescriptor = "HsaEventDescriptor", size 24, pack 4 {
        /// Type.
        event_type as "EventType": HsaEventType = 0;
        /// The GPU's node.
        node_id as "NodeId": u32 = 4;
        /// Its word.
        sync_var as "SyncVar": HsaSyncVar = 8;
    }

    /// An event. The library allocates it.
    struct HsaEvent = "HsaEvent", size 48, pack 4 {
        /// Id.
        event_id as "EventId": u32 = 0;
        /// What it says.
        event_data as "EventData": HsaEventData = 4;
    }
}

impl HsaEventData {
    /// The union read as a sync variable.
    pub fn sync_var(&self) -> HsaSyncVar {
        let [a, b, c, d, _] = self.event_data;
        transmute!([a, b, c, d])
    }

    /// Fills the union with a sync variable; the other bytes stay.
    pub fn set_sync_var(&mut self, value: HsaSyncVar) {
        let [.., last] = self.event_data;
        let [a, b, c, d]: [u32; 4] = transmute!(value);
        self.event_data = [a, b, c, d, last];
    }

    /// The union read as a memory fault.
    pub fn memory_access_fault(&self) -> HsaMemoryAccessFault {
        transmute!(self.event_data)
    }

    /// Fills the union with a memory fault.
    pub fn set_memory_access_fault(&mut self, value: HsaMemoryAccessFault) {
        self.event_data = transmute!(value);
    }

    /// The union read as a hardware exception.
    pub fn hw_exception(&self) -> HsaHwException {
        let [a, b, c, d, _] = self.event_data;
        transmute!([a, b, c, d])
    }

    /// Fills the union with a hardware exception; the other bytes stay.
    pub fn set_hw_exception(&mut self, value: HsaHwException) {
        let [.., last] = self.event_data;
        let [a, b, c, d]: [u32; 4] = transmute!(value);
        self.event_data = [a, b, c, d, last];
    }
}

abi_bits! {
    /// Words of this module for the header check.
    pub const WORDS;

    /// Why a memory access failed.
    bits HsaAccessAttributeFailure: u32 = "HsaAccessAttributeFailure" {
        /// No page there, or not for user mode.
        NOT_PRESENT = "NotPresent", 0, 1;
        /// A write to a read-only page.
        READ_ONLY = "ReadOnly", 1, 1;
        /// An execution of a page that must not be.
        NO_EXECUTE = "NoExecute", 2, 1;
        /// The host's alone.
        GPU_ACCESS = "GpuAccess", 3, 1;
        /// ECC error in DRAM.
        ECC = "ECC", 4, 1;
        /// The address is not exact.
        IMPRECISE = "Imprecise", 5, 1;
        /// 0 no RAS error, 1 ECC error in SRAM, 2 poison, 3 hang.
        ERROR_TYPE = "ErrorType", 6, 3;
        /// Reserved.
        RESERVED = "Reserved", 9, 23;
    }
}

abi_enums! {
    /// Enums of this module for the header check.
    pub const ENUMS;

    /// Type of an event, the same as KFD's.
    enum HsaEventType: u32 = "HSA_EVENTTYPE", "HSA_EVENTTYPE_" {
        /// Set by the GPU or the caller.
        SIGNAL = 0;
        /// A node came or went.
        NODECHANGE = 1;
        /// A device changed its state.
        DEVICESTATECHANGE = 2;
        /// A GPU was reset.
        HW_EXCEPTION = 3;
        /// System event.
        SYSTEM_EVENT = 4;
        /// Debug event.
        DEBUG_EVENT = 5;
        /// Profile event.
        PROFILE_EVENT = 6;
        /// Queue event.
        QUEUE_EVENT = 7;
        /// A memory access failed.
        MEMORY = 8;
    }

    /// What happened to a node.
    enum HsaNodeChangeFlags: u32 = "HSA_EVENTTYPE_NODECHANGE_FLAGS", "HSA_EVENTTYPE_NODECHANGE_" {
        /// Added.
        ADD = 0;
        /// Removed.
        REMOVE = 1;
    }

    /// What happened to a device.
    enum HsaDeviceStateChangeFlags: u32 =
        "HSA_EVENTTYPE_DEVICESTATECHANGE_FLAGS", "HSA_EVENTTYPE_DEVICESTATUSCHANGE_" {
        /// Started.
        START = 0;
        /// Stopped.
        STOP = 1;
    }

    /// Kind of a device.
    enum HsaDevice: u32 = "HSA_DEVICE", "HSA_DEVICE_" {
        /// CPU.
        CPU = 0;
        /// GPU.
        GPU = 1;
    }

    /// What a memory fault takes down.
    enum HsaEventIdMemoryFlags: u32 = "HSA_EVENTID_MEMORYFLAGS", "HSA_EVENTID_MEMORY_" {
        /// Nothing.
        RECOVERABLE = 0;
        /// The process.
        FATAL_PROCESS = 1;
        /// All of the GPU's address spaces.
        FATAL_VM = 2;
    }

    /// Why a GPU was reset.
    enum HsaHwExceptionCause: u32 =
        "HSA_EVENTID_HW_EXCEPTION_CAUSE", "HSA_EVENTID_HW_EXCEPTION_", since(ROCM_6) {
        /// Hang.
        GPU_HANG = 0;
        /// ECC error.
        ECC = 1;
    }

    /// Kind of a pending debug event.
    enum HsaDebugEventType: u32 = "HSA_DEBUG_EVENT_TYPE", "HSA_DEBUG_EVENT_TYPE_" {
        /// None.
        NONE = 0;
        /// Trap.
        TRAP = 1;
        /// Memory fault.
        VMFAULT = 2;
        /// Both.
        TRAP_VMFAULT = 3;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Enum u32 {
        /// Do not wait.
        HSA_EVENTTIMEOUT_IMMEDIATE = 0;
        /// Wait for ever.
        HSA_EVENTTIMEOUT_INFINITE = 0xffff_ffff;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn union_views_share_their_bytes() {
        let mut data = HsaEventData::default();
        data.set_memory_access_fault(HsaMemoryAccessFault {
            node_id: 1,
            virtual_address: 2 << 32 | 3,
            failure: HsaAccessAttributeFailure(4),
            flags: HsaEventIdMemoryFlags::FATAL_VM,
        });
        data.set_hw_exception(HsaHwException { node_id: 9, ..data.hw_exception() });
        let fault = data.memory_access_fault();
        assert_eq!({ fault.virtual_address }, 2 << 32 | 3);
        assert_eq!((fault.node_id, fault.flags), (9, HsaEventIdMemoryFlags::FATAL_VM));
        assert_eq!({ data.sync_var().user_data_ptr_value }, 3 << 32 | 9);
    }
}
