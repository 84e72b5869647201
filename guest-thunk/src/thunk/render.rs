//! The render node's side: device handles as libdrm_amdgpu's callers know them.
//!
//! A runtime takes the handle from `hsaKmtGetAMDGPUDeviceHandle` and gives it to libdrm_amdgpu's functions. The handle is
//! ours, so these functions have to be ours as well, for our handles.

pub mod bo;

use kfd_abi::drm::amdgpu::AMDGPU_INFO_READ_MMR_REG;
use virtio_kfd_protocol::calls::RenderInfo;
use virtio_kfd_protocol::{GpuId, RenderInfoRequest};

use super::refusal::{Outcome, Refusal};
use super::topology::{Device, Gpu};
use crate::client::Client;

/// `GB_ADDR_CONFIG` as READ_MMR_REG numbers it (amdgpu's list of readable registers).
const GB_ADDR_CONFIG: u32 = 0x263e;

/// `struct amdgpu_gpu_info` of libdrm_amdgpu's amdgpu.h (ABI of libdrm_amdgpu.so.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
#[allow(missing_docs, reason = "named as libdrm names them")]
pub struct AmdgpuGpuInfo {
    pub asic_id: u32,
    pub chip_rev: u32,
    pub chip_external_rev: u32,
    pub family_id: u32,
    pub ids_flags: u64,
    pub max_engine_clk: u64,
    pub max_memory_clk: u64,
    pub num_shader_engines: u32,
    pub num_shader_arrays_per_engine: u32,
    pub avail_quad_shader_pipes: u32,
    pub max_quad_shader_pipes: u32,
    pub cache_entries_per_quad_pipe: u32,
    pub num_hw_gfx_contexts: u32,
    pub rb_pipes: u32,
    pub enabled_rb_pipes_mask: u32,
    pub gpu_counter_freq: u32,
    pub backend_disable: [u32; 4],
    pub mc_arb_ramcfg: u32,
    pub gb_addr_cfg: u32,
    pub gb_tile_mode: [u32; 32],
    pub gb_macro_tile_mode: [u32; 16],
    pub pa_sc_raster_cfg: [u32; 4],
    pub pa_sc_raster_cfg1: [u32; 4],
    pub cu_active_number: u32,
    pub cu_ao_mask: u32,
    pub cu_bitmap: [[u32; 4]; 4],
    pub vram_type: u32,
    pub vram_bit_width: u32,
    pub ce_ram_size: u32,
    pub vce_harvest_config: u32,
    pub pci_rev_id: u32,
}

const _: () = assert!(size_of::<AmdgpuGpuInfo>() == 416);
const _: () = assert!(core::mem::offset_of!(AmdgpuGpuInfo, cu_active_number) == 324);

impl AmdgpuGpuInfo {
    /// As libdrm fills it for chips from Vega on.
    pub fn new(device: &Device, gb_addr_cfg: u32) -> Self {
        AmdgpuGpuInfo {
            asic_id: device.device_id,
            chip_rev: device.chip_rev,
            chip_external_rev: device.external_rev,
            family_id: device.family,
            ids_flags: device.ids_flags,
            max_engine_clk: device.max_engine_clock,
            max_memory_clk: device.max_memory_clock,
            num_shader_engines: device.num_shader_engines,
            num_shader_arrays_per_engine: device.num_shader_arrays_per_engine,
            num_hw_gfx_contexts: device.num_hw_gfx_contexts,
            rb_pipes: device.num_rb_pipes,
            enabled_rb_pipes_mask: device.enabled_rb_pipes_mask,
            gpu_counter_freq: device.gpu_counter_freq,
            gb_addr_cfg,
            cu_active_number: device.cu_active_number,
            cu_ao_mask: device.cu_ao_mask,
            cu_bitmap: device.cu_bitmap,
            vram_type: device.vram_type,
            vram_bit_width: device.vram_bit_width,
            ce_ram_size: device.ce_ram_size,
            vce_harvest_config: device.vce_harvest_config,
            pci_rev_id: device.pci_rev,
            ..Default::default()
        }
    }
}

/// A handle is a GPU's id in the half of the address space that belongs to the kernel: no other library's handle,
/// which is a pointer, can be taken for one of ours, and ours need no table.
const HANDLE: u64 = 0xffff_8000_0000_0000;

/// `hsaKmtGetAMDGPUDeviceHandle`: a GPU's handle, the same at every call.
pub fn device_handle(gpu: &Gpu) -> Outcome<u64> {
    match gpu.device {
        Some(_) => Ok(HANDLE | u64::from(gpu.gpu_id.0)),
        None => Err(Refusal::handle("the GPU's render node gave no information")),
    }
}

/// The GPU of a handle, none where the handle is not ours.
pub fn gpu_of(handle: u64) -> Option<GpuId> {
    u32::try_from(handle ^ HANDLE).ok().filter(|id| *id != 0).map(GpuId)
}

/// A register that amdgpu lets applications read.
pub fn gb_addr_config(client: &Client, gpu_id: GpuId) -> Outcome<u32> {
    let request = RenderInfoRequest {
        gpu_id,
        query: AMDGPU_INFO_READ_MMR_REG,
        return_size: 4,
        // Offset, count, every instance, no flags.
        arguments: [GB_ADDR_CONFIG, 1, u32::MAX, 0],
        pad: 0,
    };
    let (_, bytes) = client.call::<RenderInfo>(&request, &[], 4)?;
    let word =
        bytes.first_chunk::<4>().ok_or_else(|| Refusal::error("READ_MMR_REG gave less than a register"))?;
    Ok(u32::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtio_kfd_protocol::Apertures;

    fn gpu(id: u32) -> Gpu {
        let (apertures, device) = (Apertures::default(), Some(Device::default()));
        Gpu { node: 1, gpu_id: GpuId(id), apertures, device, hdp_registers: None }
    }

    #[test]
    fn handles_are_stable_and_ours_alone() {
        let (first, second) = (device_handle(&gpu(70_001)).unwrap(), device_handle(&gpu(70_002)).unwrap());
        assert_ne!(first, second);
        assert_eq!(device_handle(&gpu(70_001)), Ok(first));
        assert_eq!(gpu_of(first), Some(GpuId(70_001)));
        let somewhere = Box::new(0u64);
        assert_eq!(gpu_of(std::ptr::from_ref(&*somewhere).addr() as u64), None);
        assert_eq!([gpu_of(0), gpu_of(HANDLE)], [None, None]);
    }

    #[test]
    fn a_gpu_without_device_information_has_no_handle() {
        assert!(device_handle(&Gpu { device: None, ..gpu(1) }).is_err());
    }
}
